"""
Looking at an engine again as the server would have: step by step, with what was known by then, on a clock of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope_exporter.contract import (
    ControlOutcome,
    ControlReport,
    MitigationState,
    Phase,
    RankLife,
    RankReport,
    RequestTable,
)
from rankscope_server.domain.clock import Moment, NodeClock
from rankscope_server.domain.facts import EngineFacts, ExporterFacts, RankFacts
from rankscope_server.domain.findings import STICKY, EngineMemory, assess
from rankscope_server.domain.forecast import assess_forecast
from rankscope_server.domain.history import StepHistory
from rankscope_server.domain.incident_life import Incident, follow
from rankscope_server.domain.model import Finding, FindingKind
from rankscope_server.domain.outlook import Forecast
from rankscope_server.domain.state import current_findings
from rankscope_server.replay.engines import EngineRank, SavedEngine
from rankscope_server.replay.timeline import Nanoseconds, Timeline

PERIOD_NS = 250_000_000
"""
Time between two looks while something happens, as the server's.
"""

WATCHED_NS = 15_000_000_000
"""
For so long into a silence with a step in flight it is looked at as often: limits for a hang lie there.
"""

IDLE_NS = 4_000_000_000
"""
The same in a silence without one.
"""

STRETCH = 4
"""
After that, the silence so far is divided by this for the time until the next look.
"""

LIFE_NS = 1_000_000_000
"""
A process that is known to be lost at the end counts as lost so long after the last thing that it did.
"""

FORECAST_SECONDS = 1.0
"""
Time between two forecasts while something drifts and the ranks have not parted.
"""

Progress = Callable[[float], None]


@dataclass(slots=True)
class Found:
    """
    A finding, and when the server would have found it.
    """

    finding: Finding
    found_unix: float
    over_unix: float | None = None
    """When it no longer held; None while it does at the end."""


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """
    What came of a replay: the engine as it stood at the end, and everything that was found on the way.
    """

    engine: SavedEngine
    facts: EngineFacts
    memory: EngineMemory
    found: tuple[Found, ...]
    """In the order in which it was found."""
    incidents: tuple[Incident, ...]
    """What the server would have made of it, oldest first; all but the last are closed."""
    forecasts: tuple[tuple[float, Forecast], ...]
    """Wall-clock second and what was foreseen then, while something drifted."""
    begun_unix: float
    ended: Moment
    looks: int
    left_out: int
    """Records whose times make no sense."""


@dataclass(slots=True, eq=False)
class _Track:
    """
    One rank as time passes: what it has shown so far.
    """

    rank: EngineRank
    timeline: Timeline
    limit_ns: int
    """Up to which its file speaks, by its node's monotonic clock."""
    history: StepHistory = field(default_factory=StepHistory)
    trim: MitigationState | None = None
    life: RankLife = RankLife.RUNNING
    life_since: float = 0.0
    """Wall-clock second since which `life` holds."""
    _report: RankReport | None = None
    _stands: tuple[object, ...] = ()

    def look(self, unix_ns: int, *, life: RankLife) -> RankFacts:
        """
        What would have been known of the rank at `unix_ns`.
        """
        rank, saved = self.rank, self.rank.saved
        node_ns = min(rank.node_ns(unix_ns), self.limit_ns)
        if self.timeline.give(self.history, node_ns):
            self._note_trim()
        answered = rank.unix_ns(node_ns) / 1e9
        if self.life is not life or not self.life_since:
            self.life, self.life_since = life, answered
        report = self._told(at_end=node_ns >= (self.timeline.last_ns or 0), node_ns=node_ns)
        return RankFacts(
            id=saved.id,
            label=rank.label,
            report=report,
            history=self.history,
            clock=NodeClock(node_ns, answered, answered),
            exporter=saved.file.shown,
            first_seen=unix_ns / 1e9,  # ranks of which no file is here are told of by themselves, and not as blindness
            life_since=self.life_since,
            requests=self._requests(),
            reported=answered,
        )

    def _note_trim(self) -> None:
        """
        Where the trim fix stands by the newest step that says so: the file has the last word on it, which came later.
        """
        for record in self.history.backwards(2):
            if record["phase"] >= Phase.STATE_UPDATED and (record["lengths"] or record["mitigation"]):
                known = {state.value: state for state in MitigationState}
                self.trim = known.get(int(record["mitigation"]), self.trim)
                return

    def _told(self, *, at_end: bool, node_ns: int) -> RankReport:
        """
        The rank's report as it must have been at the time; made anew only when it says something else.
        """
        final = self.rank.saved.report
        failed = final.failure if final.failure is not None and at_end else None
        acted = self.history.last >= final.control.acted_step
        device_ns = self.rank.saved.device_ns
        sampled = device_ns is not None and device_ns <= node_ns
        stands = (self.life, failed is not None, acted, self.trim, sampled, at_end)
        step = max(self.history.last, final.step if at_end else 0)
        if self._report is None or stands != self._stands:
            self._stands = stands
            changes: dict[str, object] = {"life": self.life, "failure": failed}
            if not acted:
                changes["control"] = _before(final.control)
            if self.trim is not None:
                changes["mitigations"] = [
                    m.model_copy(update={"state": self.trim}) if m.mitigation == "trim" else m
                    for m in final.mitigations
                ]
            changes["device"] = final.device if sampled else None
            self._report = final.model_copy(update=changes)
        changes = {"step": step}
        if sampled and final.device is not None and device_ns is not None:
            changes["device"] = final.device.model_copy(update={"age_seconds": (node_ns - device_ns) / 1e9})
        return self._report.model_copy(update=changes)

    def _requests(self) -> RequestTable | None:
        """
        The request table with the rows that had been written by now; None before the first.
        """
        table = self.rank.saved.requests
        if table is None:
            return None
        rows = [row for row in table.rows if row.step <= self.history.last]
        if len(rows) == len(table.rows):
            return table
        return table.model_copy(update={"rows": rows, "drifting": len(rows)}) if rows else None


def _before(control: ControlReport) -> ControlReport:
    """
    What a rank said before it acted on its last command: that it was going to.
    """
    return control.model_copy(update={"outcome": ControlOutcome.PENDING, "acted_step": 0})


def play(engine: SavedEngine, *, until_unix: float | None = None, progress: Progress = lambda _: None) -> Played:
    """
    Look at an engine from its first record on, up to `until_unix`, or to the end of what its files speak of.

    A rank whose copy does not say when it was made is followed up to its last record: whether time passed after it is not
    known then, and no silence is held against it.
    """
    tracks = [_track(rank, until_unix) for rank in engine.ranks]
    moments = _moments(tracks)
    end = max(track.rank.unix_ns(track.limit_ns) for track in tracks)
    now = begin = int(moments[0]) if len(moments) else end
    end = max(end, begin)
    log, forecasts, incidents = _Log(), _Forecasts(), _Incidents()
    memory, looks = EngineMemory(), 0
    while True:
        facts = _look(engine, tracks, now, memory)
        memory = assess(facts, memory, at(now))
        log.note(memory, now / 1e9)
        incidents.note(facts, memory, at(now))
        forecasts.note(facts, memory, at(now))
        looks += 1
        if now >= end:
            break
        progress((now - begin) / (end - begin))
        now = min(_next_look(now, moments, facts), end)
    progress(1.0)
    log.settle(memory)
    left_out = sum(track.timeline.left_out for track in tracks)
    return Played(
        engine=engine,
        facts=facts,
        memory=memory,
        found=tuple(log.found),
        incidents=tuple(incidents.all),
        forecasts=tuple(forecasts.made),
        begun_unix=begin / 1e9,
        ended=at(end),
        looks=looks,
        left_out=left_out,
    )


def at(unix_ns: int) -> Moment:
    """
    A moment of the replay: both clocks show wall-clock time.
    """
    return Moment(unix_ns / 1e9, unix_ns / 1e9)


def _track(rank: EngineRank, until_unix: float | None) -> _Track:
    timeline = Timeline(rank.saved.records, rank.saved.created_ns)
    last = rank.saved.created_ns if timeline.last_ns is None else timeline.last_ns
    if until_unix is not None:
        limit = rank.node_ns(round(until_unix * 1e9))
    elif rank.taken.ns is not None:
        limit = max(rank.taken.ns, last)  # a name tells seconds only
    else:
        limit = last
    return _Track(rank, timeline, limit)


def _moments(tracks: list[_Track]) -> Nanoseconds:
    """
    Every time at which something new was known of a rank, on the engine's common axis.
    """
    return np.unique(np.concatenate([track.timeline.moments + track.rank.unix_ns(0) for track in tracks]))


def _look(engine: SavedEngine, tracks: list[_Track], now: int, memory: EngineMemory) -> EngineFacts:
    parted = memory.has(*STICKY)
    ranks = tuple(track.look(now, life=_life(track, now, parted=parted)) for track in tracks)
    unix = now / 1e9
    exporters = tuple(
        ExporterFacts(shown, unix, "", control=None, token=False, since=unix)
        for shown in dict.fromkeys(rank.exporter for rank in ranks)
    )
    return EngineFacts("", engine.name, ranks, exporters)


def _life(track: _Track, now: int, *, parted: bool) -> RankLife:
    """
    What is taken for the life of a rank's process; RUNNING while nothing else is known.

    A copy tells only that a process was lost when it was made. Where nothing else explains why the ranks stand still, it
    was lost right after the last thing that it did; where they had parted, it may as well have been ended because of that.
    """
    life = track.rank.taken.life
    if parted or life not in (RankLife.GONE, RankLife.STOPPED):
        return track.life
    last = track.timeline.last_ns or track.rank.saved.created_ns
    return life if now >= track.rank.unix_ns(last) + LIFE_NS else track.life


def _next_look(now: int, moments: Nanoseconds, facts: EngineFacts) -> int:
    """
    When to look again: soon while something happens, ever more rarely while nothing does.
    """
    upcoming = int(np.searchsorted(moments, now, side="right"))
    if upcoming < len(moments) and moments[upcoming] <= now + PERIOD_NS:
        return now + PERIOD_NS
    silence = now - int(moments[upcoming - 1]) if upcoming else 0
    in_flight = any(rank.in_flight for rank in facts.ranks)
    pace = PERIOD_NS if silence < (WATCHED_NS if in_flight else IDLE_NS) else silence // STRETCH
    later = now + max(pace, PERIOD_NS)
    return min(later, int(moments[upcoming])) if upcoming < len(moments) else later


class _Log:
    """
    Everything that was found, and how it ended.
    """

    def __init__(self) -> None:
        self.found: list[Found] = []
        self._open: dict[tuple[FindingKind, int], Found] = {}

    def note(self, memory: EngineMemory, unix: float) -> None:
        """
        Take in what holds at a look.
        """
        for key in [key for key in self._open if key not in memory.findings]:
            over = self._open.pop(key)
            over.over_unix = unix
            over.finding = replace(over.finding, open=False)
        for key, finding in memory.findings.items():
            known = self._open.get(key)
            if known is None:
                known = self._open[key] = Found(finding, unix)
                self.found.append(known)
            known.finding = finding

    def settle(self, memory: EngineMemory) -> None:
        """
        Take over what the memory says of its findings at the end: when they were seen last.
        """
        last = {(finding.kind, finding.since_unix): finding for finding in self._shown(memory)}
        for found in self._open.values():
            found.finding = last.get((found.finding.kind, found.finding.since_unix), found.finding)

    @staticmethod
    def _shown(memory: EngineMemory) -> Iterator[Finding]:
        return (finding for finding in memory.all_findings if finding.open)


class _Incidents:
    """
    The incidents of the engine, as the server would have kept them.
    """

    def __init__(self) -> None:
        self.all: list[Incident] = []

    def note(self, facts: EngineFacts, memory: EngineMemory, now: Moment) -> None:
        """
        Take in a look.
        """
        known = self.all[-1] if self.all else None
        taken = {incident.id for incident in self.all}
        followed, _ = follow(known, facts, memory, current_findings(facts, memory), now, taken)
        if followed is None:
            return
        if known is not None and followed.id == known.id:
            self.all[-1] = followed
        else:
            self.all.append(followed)


class _Forecasts:
    """
    What was foreseen, from when something drifts until the ranks part.
    """

    def __init__(self) -> None:
        self.made: list[tuple[float, Forecast]] = []

    def note(self, facts: EngineFacts, memory: EngineMemory, now: Moment) -> None:
        """
        Take in a look.
        """
        if not memory.has(FindingKind.DRIFT) or memory.has(FindingKind.GUARD_DISAGREEMENT):
            return
        if not self.made or now.unix - self.made[-1][0] >= FORECAST_SECONDS:
            self.made.append((now.unix, assess_forecast(facts, now)))
