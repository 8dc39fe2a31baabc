"""
The life of an incident: findings of one engine belong together from the first that opens it until none has held for a while.

`follow` takes an incident from one look at its engine to the next. It is told what holds now, and believes bad news at
once; good news (it is over, it can be closed) only while every exporter of the engine answers.
"""

import bisect
import dataclasses
import hashlib
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count

import numpy as np

from rankscope_exporter.contract import Detail, Lengths
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, most_common, seconds
from rankscope_server.domain.findings import STICKY, EngineMemory
from rankscope_server.domain.incident import CaptureView, IncidentEvent, IncidentLife
from rankscope_server.domain.model import ActedMark, Evidence, Finding, FindingKind, Severity
from rankscope_server.domain.state import sentence_case

CLOSE_SECONDS = 120.0
"""
An incident of which nothing has held for this long is closed; what comes after that is another one.
"""

TIMELINE_KEPT, TIMELINE_HEAD = 256, 32
"""
Entries that a timeline keeps, and how many of them are the first ones: how it began is never left out.
"""

DRIFT_SEARCHED = 1024
"""
Steps back that are searched for the last one that drifted.
"""

LEVELS = {
    FindingKind.DRIFT: 1,
    FindingKind.MITIGATION_MIXED: 2,
    FindingKind.MASK_DISAGREEMENT: 3,
    FindingKind.WIDTH_MISMATCH: 4,
    FindingKind.BATCH_MISMATCH: 4,
    FindingKind.GUARD_DISAGREEMENT: 4,
}
"""
How far ranks have parted: an incident worsens when a finding of a higher level joins. The others are beside this order.
"""

WORST_FIRST = (
    FindingKind.WEDGED,
    FindingKind.RANK_LOST,
    FindingKind.GUARD_DISAGREEMENT,
    FindingKind.WIDTH_MISMATCH,
    FindingKind.BATCH_MISMATCH,
    FindingKind.MASK_DISAGREEMENT,
    FindingKind.MITIGATION_MIXED,
    FindingKind.STALLED,
    FindingKind.DRIFT,
    FindingKind.BLIND,
)

_LIVES = (IncidentLife.OPEN, IncidentLife.WORSENING, IncidentLife.WEDGED)
"""
The lives of an incident of which something holds, worst last.
"""

Key = tuple[FindingKind, int]
"""
Kind and dp rank: an engine has one finding of each at a time. -1 where a finding is not about one data-parallel rank.
"""


@dataclass(frozen=True, slots=True)
class Incident:
    """
    What is remembered of an incident from one look at its engine to the next, and over a restart of the server.
    """

    id: str
    deployment: str
    engine: str
    model: str
    vllm_version: str
    runner: str
    life: IncidentLife
    opened_unix: float
    changed_unix: float
    closed_unix: float | None = None
    level: int = 0
    """Level (`LEVELS`) of what it opened with; 0 while it has had no finding that has one."""
    reach: int = 1
    """How many batches can be in flight: a toggle shows itself in all of them only after as many steps."""
    generation: int = 0
    """Newest toggle that had taken effect when it opened."""
    unseen: tuple[str, ...] = ()
    """Hooks that were off when it opened: what they would show was not what was found."""
    missing: int = 0
    """Ranks that no exporter had spoken of when it opened."""
    findings: tuple[Finding, ...] = ()
    """All that were found, in this order; `open` as of now."""
    timeline: tuple[IncidentEvent, ...] = ()
    left_out: int = 0
    """Entries that the timeline had no room for."""
    acted: tuple[ActedMark, ...] = ()
    """When toggles of the trim fix took effect since it opened."""
    drift_last: int | None = None
    """The last step that drifted, once drift is over; None before that, and where it is not known."""
    ended: bool = False
    """Whether every process of the engine is gone."""
    captures: tuple[CaptureView, ...] = ()
    capture_reasons: tuple[str, ...] = ()
    """Why copies of the flight records were asked for, each reason once."""
    quiet_since: float | None = None
    """Monotonic second of the server since which nothing holds; means nothing to another run of it."""

    @property
    def kind(self) -> FindingKind:
        """The worst that was found."""
        return min((finding.kind for finding in self.findings), key=WORST_FIRST.index)

    @property
    def severity(self) -> Severity:
        """The loudest of what was found."""
        critical = any(finding.severity is Severity.CRITICAL for finding in self.findings)
        return Severity.CRITICAL if critical else Severity.WARNING

    @property
    def step(self) -> int | None:
        """First step of its first finding that has one."""
        return next((finding.step for finding in self.findings if finding.step is not None), None)

    @property
    def compared(self) -> bool:
        """Whether all that ranks could disagree about was seen of all of them, so that agreement can be told."""
        return self.runner == "V1" and not self.unseen and not self.missing and self.finding(FindingKind.BLIND) is None

    def finding(self, *kinds: FindingKind) -> Finding | None:
        """
        The first that was found of these kinds.
        """
        return next((finding for finding in self.findings if finding.kind in kinds), None)


def incident_id(opened_unix: float, deployment: str, engine: str, taken: Container[str] = ()) -> str:
    """
    A short name that sorts by time: `i-20261201-134455-7f2a`. The same for the same arguments.
    """
    stamp = datetime.fromtimestamp(opened_unix, UTC).strftime("%Y%m%d-%H%M%S")
    names = (f"i-{stamp}-{_digest(deployment, engine, number)}" for number in count())
    return next(name for name in names if name not in taken)


def _digest(deployment: str, engine: str, number: int) -> str:
    return hashlib.blake2s(f"{deployment}\0{engine}\0{number}".encode(), digest_size=2).hexdigest()


def key_of(finding: Finding) -> Key:
    """
    What tells a finding from the others of its engine.
    """
    if finding.kind is FindingKind.BLIND or not finding.ranks:
        return finding.kind, -1
    return finding.kind, finding.ranks[0].dp_rank


def follow(
    incident: Incident | None,
    engine: EngineFacts,
    memory: EngineMemory,
    current: Sequence[Finding],
    now: Moment,
    taken: Container[str] = (),
) -> tuple[Incident | None, tuple[IncidentEvent, ...]]:
    """
    The incident after a look at its engine, and what happened: None while there is none.

    `current` are the findings that say what the engine is like now (`domain.state.current_findings`). `taken` are ids that
    a new incident must not get.
    """
    if incident is not None and incident.life is IncidentLife.CLOSED:
        incident = None
    if incident is None:
        if not current or engine.replaced:
            return None, ()
        incident = _opened(engine, memory, now, taken)
    if engine.replaced:
        return close(incident, "The engine has ended, and another one has taken its place.", now)
    at = _no_earlier(incident, now)
    seen = not _out_of_sight(engine, now)
    findings, joined, over = _merge(incident, memory, current, seen=seen)
    life, level = _standing(incident, engine, findings, joined, seen=seen)
    acted = [mark for mark in memory.acted if mark.generation > _newest_generation(incident)]
    events = [
        *(_acted_event(mark, at) for mark in acted),
        *_joined_events(incident, joined, findings, life, at),
        *(IncidentEvent(at, "over", _over_sentence(finding, engine)) for finding in over),
        *_passing_events(incident, engine, life, at),
    ]
    quiet_since = _quiet_since(incident, life, now, seen=seen)
    same = all(new is old for new, old in zip(findings, incident.findings, strict=False))
    state = (life, level, quiet_since, engine.ended)
    if not events and same and state == (incident.life, incident.level, incident.quiet_since, incident.ended):
        return _close_in_time(incident, now)
    followed = dataclasses.replace(
        incident,
        life=life,
        level=level,
        findings=findings,
        acted=(*incident.acted, *acted),
        drift_last=_drift_last(incident, engine, findings, over),
        ended=engine.ended,
        quiet_since=quiet_since,
    )
    followed, closing = _close_in_time(note(followed, *events), now)
    return followed, (*events, *closing)


def _close_in_time(incident: Incident, now: Moment) -> tuple[Incident, tuple[IncidentEvent, ...]]:
    """
    The incident, closed if nothing of it has held for long enough.
    """
    if incident.quiet_since is None or now.monotonic - incident.quiet_since < CLOSE_SECONDS:
        return incident, ()
    return close(incident, f"Nothing of it has held for {seconds(CLOSE_SECONDS)}.", now)


def close(incident: Incident, sentence: str, now: Moment) -> tuple[Incident, tuple[IncidentEvent, ...]]:
    """
    The incident at its end: it recovered, or its engine has ended or is not known any more.
    """
    event = IncidentEvent(_no_earlier(incident, now), "closed", sentence)
    closed = note(dataclasses.replace(incident, life=IncidentLife.CLOSED, quiet_since=None), event)
    return dataclasses.replace(closed, closed_unix=event.at_unix), (event,)


def note(incident: Incident, *events: IncidentEvent) -> Incident:
    """
    The incident with more entries in its timeline, each at its place in time; none is before it opened.
    """
    if not events:
        return incident
    timeline = list(incident.timeline)
    for event in events:
        at = max(event.at_unix, incident.opened_unix)
        place = bisect.bisect_right(timeline, at, key=lambda entry: entry.at_unix)
        timeline.insert(place, dataclasses.replace(event, at_unix=at))
    timeline, left_out = _bounded(timeline, incident.left_out)
    return dataclasses.replace(incident, timeline=tuple(timeline), left_out=left_out, changed_unix=timeline[-1].at_unix)


def _bounded(timeline: list[IncidentEvent], left_out: int) -> tuple[list[IncidentEvent], int]:
    """
    A timeline that is no longer than it may be: an entry says how many were left out, and until when.
    """
    if len(timeline) <= TIMELINE_KEPT:
        return timeline, left_out
    later = [event for event in timeline[TIMELINE_HEAD:] if event.what != "left out"]
    spare = len(later) - (TIMELINE_KEPT - TIMELINE_HEAD - 1)
    left_out += spare
    mark = IncidentEvent(later[spare - 1].at_unix, "left out", f"{left_out} entries up to here are left out.")
    return [*timeline[:TIMELINE_HEAD], mark, *later[spare:]], left_out


def _no_earlier(incident: Incident, now: Moment) -> float:
    """
    The time of what happens now: a wall clock that was set back puts it before nothing that happened already.
    """
    return max(now.unix, incident.timeline[-1].at_unix if incident.timeline else incident.opened_unix)


def _quiet_since(incident: Incident, life: IncidentLife, now: Moment, *, seen: bool) -> float | None:
    if life is not IncidentLife.RECOVERED or not seen:
        return None  # only time in which it is seen that nothing holds counts
    return now.monotonic if incident.quiet_since is None else incident.quiet_since


def _opened(engine: EngineFacts, memory: EngineMemory, now: Moment, taken: Container[str]) -> Incident:
    identities = [rank.report.identity for rank in engine.ranks]
    return Incident(
        id=incident_id(now.unix, engine.deployment, engine.engine, taken),
        deployment=engine.deployment,
        engine=engine.engine,
        model=most_common(identity.model for identity in identities),
        vllm_version=most_common(identity.vllm_version for identity in identities),
        runner=most_common(identity.runner for identity in identities),
        life=IncidentLife.OPEN,
        opened_unix=now.unix,
        changed_unix=now.unix,
        reach=max(1, *(identity.pp_size for identity in identities)),
        generation=max((mark.generation for mark in memory.acted), default=0),
        unseen=_blind_hooks(engine),
        missing=engine.missing,
    )


def _blind_hooks(engine: EngineFacts) -> tuple[str, ...]:
    """
    What cannot be seen of an engine and would be: hooks that are off, by rank.
    """
    lost = [f"{rank.label} {hook.hook}" for rank in engine.ranks for hook in rank.lost_hooks]
    return (*lost, *(f"{rank.label} over budget" for rank in engine.ranks if rank.report.detail is Detail.CUT))


def _out_of_sight(engine: EngineFacts, now: Moment) -> bool:
    """
    Whether it cannot be said that something is over: an exporter is out of reach, or has not told of all yet.
    """
    return not all(exporter.reached(now) for exporter in engine.exporters)


def _passing_events(incident: Incident, engine: EngineFacts, life: IncidentLife, at: float) -> Iterator[IncidentEvent]:
    if engine.ended and not incident.ended:
        sentence = f"Every process of the engine has ended; its last step was {engine.newest_step}."
        yield IncidentEvent(at, "ended", sentence)
    if life is IncidentLife.RECOVERED and incident.life is not life:
        sentence = f"Nothing of it holds any more; it is closed if that stays so for {seconds(CLOSE_SECONDS)}."
        yield IncidentEvent(at, "recovered", sentence)


def _newest_generation(incident: Incident) -> int:
    return max((mark.generation for mark in incident.acted), default=incident.generation)


def _acted_event(mark: ActedMark, at: float) -> IncidentEvent:
    word = "on" if mark.desired else "off"
    sentence = f"The trim fix was turned {word} at step {mark.step}."
    return IncidentEvent(min(mark.at_unix, at), f"fix {word}", sentence)


def _merge(
    incident: Incident, memory: EngineMemory, current: Sequence[Finding], *, seen: bool
) -> tuple[tuple[Finding, ...], list[Finding], list[Finding]]:
    """
    The findings of an incident with those that hold now: all, those that joined (anew), and those that are over.

    What cannot become untrue stays although the server has forgotten it: it was restarted while its store was away.
    """
    holding = {key_of(finding): finding for finding in current}
    remembered = {key_of(finding) for finding in memory.findings.values()}
    findings: list[Finding] = []
    joined: list[Finding] = []
    over: list[Finding] = []
    for known in incident.findings:
        key = key_of(known)
        found = holding.pop(key, None)
        if found is not None:
            findings.append(_renewed(known, found))
            if not known.open:
                joined.append(findings[-1])
        elif known.open and seen and not (known.kind in STICKY and key not in remembered):
            findings.append(dataclasses.replace(known, open=False))
            over.append(findings[-1])
        else:
            findings.append(known)
    for found in sorted(holding.values(), key=_in_order_of_cause):
        findings.append(found)
        joined.append(found)
    return tuple(findings), joined, over


def _in_order_of_cause(finding: Finding) -> tuple[float, int]:
    """
    Sort key: what began at an earlier step comes first, and of one step masks before the guards that rest on them.
    """
    return math.inf if finding.step is None else finding.step, LEVELS.get(finding.kind, len(LEVELS))


def _renewed(known: Finding, found: Finding) -> Finding:
    """
    A finding that is known, as it shows itself now: when and where it began stays.
    """
    step = known.step if known.step is not None else found.step
    if known == found:
        return known
    before, after = known.evidence, found.evidence
    evidence = Evidence(
        after.values or before.values, after.requests or before.requests, before.began_with or after.began_with
    )
    return dataclasses.replace(
        found, step=step, since_unix=known.since_unix, found_unix=known.found_unix, evidence=evidence, open=True
    )


def _standing(
    incident: Incident, engine: EngineFacts, findings: Sequence[Finding], joined: Sequence[Finding], *, seen: bool
) -> tuple[IncidentLife, int]:
    """
    Where the incident stands, and the level that it opened with.

    Blindness that was there before anything else was found does not keep it open for ever; what went out of sight since does.
    """
    holding = [finding for finding in findings if finding.open]
    level = incident.level or max((LEVELS.get(finding.kind, 0) for finding in joined), default=0)
    real = [finding for finding in holding if finding.kind is not FindingKind.BLIND]
    if not real:
        was_real = any(finding.kind is not FindingKind.BLIND for finding in findings)
        blind = bool(set(_blind_hooks(engine)) - set(incident.unseen)) if was_real else bool(holding)
        if seen and not blind:
            return IncidentLife.RECOVERED, level
        return IncidentLife.OPEN if seen and incident.life is IncidentLife.RECOVERED else incident.life, level
    life = IncidentLife.OPEN
    if any(LEVELS.get(finding.kind, 0) > level for finding in real):
        life = IncidentLife.WORSENING
    if any(_wedges(engine, finding) for finding in real):
        life = IncidentLife.WEDGED
    if (not seen or engine.ended) and incident.life in _LIVES:
        life = max(life, incident.life, key=_LIVES.index)
    return life, level


def _wedges(engine: EngineFacts, finding: Finding) -> bool:
    if finding.kind is FindingKind.STALLED:
        return finding.severity is Severity.CRITICAL
    if finding.kind is FindingKind.RANK_LOST:
        dps = {rank.dp_rank for rank in finding.ranks}
        return any(rank.running and rank.id.dp_rank in dps and rank.id not in finding.ranks for rank in engine.ranks)
    return finding.kind is FindingKind.WEDGED


def _joined_events(
    incident: Incident, joined: Sequence[Finding], findings: Sequence[Finding], life: IncidentLife, at: float
) -> Iterator[IncidentEvent]:
    """
    An entry for each finding that joined. Where the incident got worse, that of the worst says so.
    """
    before = _LIVES.index(incident.life) if incident.life in _LIVES else 0
    worse = life in _LIVES and _LIVES.index(life) > before
    if worse and not joined:  # a stall that lasts, a rank whose peers have begun to wait
        joined = [min((f for f in findings if f.open), key=lambda one: WORST_FIRST.index(one.kind))]
    worst = min(joined, key=lambda one: WORST_FIRST.index(one.kind), default=None) if worse else None
    for finding in joined:
        what = life.value if finding is worst else "found"
        again = (
            "Again: " if any(key_of(known) == key_of(finding) and not known.open for known in incident.findings) else ""
        )
        yield IncidentEvent(at, what, again + sentence_case(finding.sentence))


_OVER = {
    FindingKind.WEDGED: "The ranks move again",
    FindingKind.STALLED: "The ranks move again",
    FindingKind.RANK_LOST: "No rank is lost any more",
    FindingKind.MITIGATION_MIXED: "The ranks agree about the trim fix again",
    FindingKind.MASK_DISAGREEMENT: "With the trim fix on, masks agree again; tokens that were wrong stay wrong",
}


def _over_sentence(finding: Finding, engine: EngineFacts) -> str:
    if finding.kind is FindingKind.DRIFT:
        last = last_drifting_step(engine)
        if engine.idle:
            return "Drift is over: no request is left that could drift."
        return "Drift is over." if last is None else f"Drift is over: the last step that drifted was {last}."
    if finding.kind is FindingKind.BLIND:
        return "All that should be seen is seen again."
    said = _OVER.get(finding.kind, f"No {finding.kind.value} any more")
    return f"{said}; the newest step is {engine.newest_step}."


def last_drifting_step(engine: EngineFacts) -> int | None:
    """
    The last step at which a rank drifted; None where that is not held any more, and on V2, which does not tell it step by step.
    """
    last = 0
    for rank in engine.ranks:
        records = rank.history.tail(DRIFT_SEARCHED)
        drifting = np.flatnonzero((records["lengths"] == Lengths.OUTPUT_TOKENS) & (records["drift_max"] > 0))
        if drifting.size:
            last = max(last, int(records["step"][drifting[-1]]))
    return last or None


def _drift_last(
    incident: Incident, engine: EngineFacts, findings: Sequence[Finding], over: Sequence[Finding]
) -> int | None:
    drifts = [finding for finding in findings if finding.kind is FindingKind.DRIFT]
    if any(finding.open for finding in drifts):
        return None
    return last_drifting_step(engine) if any(finding in drifts for finding in over) else incident.drift_last


def resume(older: Incident, newer: Incident) -> Incident:
    """
    One incident out of two on the same engine: what the store had kept, and what was opened before the store could be read.
    """
    begun = {key_of(finding): finding for finding in older.findings}
    renewed = {key_of(finding): finding for finding in newer.findings}
    findings = [
        _renewed(finding, renewed[key]) if key in renewed and renewed[key].open else finding
        for key, finding in begun.items()
    ]
    joined = dataclasses.replace(
        newer,
        id=older.id,
        opened_unix=older.opened_unix,
        changed_unix=older.changed_unix,
        level=older.level or newer.level,
        generation=older.generation,
        unseen=older.unseen,
        findings=(*findings, *(finding for key, finding in renewed.items() if key not in begun)),
        timeline=older.timeline,
        left_out=older.left_out,
        acted=tuple({mark.generation: mark for mark in (*older.acted, *newer.acted)}.values()),
        captures=(*older.captures, *newer.captures),
        capture_reasons=tuple(dict.fromkeys((*older.capture_reasons, *newer.capture_reasons))),
    )
    return note(joined, *newer.timeline)
