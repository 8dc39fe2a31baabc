"""
The server's side, on simulated time: polls as its pollers do, and looks as its board does.

What is driven is what is under test: `ExporterTrack`, `Fleet` and `assess`. The loops around them are played, since
they wait for clocks and sockets.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
from made_ranks import START_UNIX
from sim_exporter import MadeExporter
from sim_oddities import Counts, Oddity
from sim_ranks import Tape

from rankscope_exporter.contract import RANKS_PATH, STEPS_PATH, Phase, StepsFrame
from rankscope_server.domain.blindness import GRACE_SECONDS
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import REACH_SECONDS, SILENT_SECONDS, EngineFacts
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.ingest.client import TIMEOUT_SECONDS
from rankscope_server.ingest.poller import RANKS_SECONDS, back_off
from rankscope_server.ingest.tracks import ExporterTrack, Fleet

DEPLOYMENT = "chat"
POLL_SECONDS = 0.25
PULSE_SECONDS = 0.05
"""
Pause after a look: what arrives meanwhile is judged together.
"""
LOOK_SECONDS = 1.0
"""
Time after which a look is taken although nothing has arrived.
"""


def moment(at: float) -> Moment:
    """
    The server's clocks at a second of the simulated world.
    """
    return Moment(START_UNIX + at, 1000.0 + at)


@dataclass(frozen=True, slots=True)
class Look:
    """
    One look at one engine.
    """

    at: float
    engine: EngineFacts
    before: EngineMemory
    after: EngineMemory
    blind_due: bool
    """Whether an exporter of the engine is out of reach, so that the engine has to be called blind."""


@dataclass(slots=True)
class _Polled:
    """
    One path of one exporter, as it is polled.
    """

    exporter: MadeExporter
    track: ExporterTrack
    path: str
    period: float
    failures: int = 0
    answered: float | None = None
    """When it last answered, as the simulation knows; for what is to be expected of `blind`."""
    number: int = 0
    """The poll that is due; earlier ones that still stand in the queue were hurried."""


@dataclass(slots=True)
class Watch:
    """
    Watches one deployment from `since` on. `seen` is called for each engine at each look, until it says that this was enough.
    """

    exporters: list[MadeExporter]
    random: Random
    counts: Counts
    seen: Callable[[Look], bool]
    since: float = 0.0
    fleet: Fleet = field(default_factory=Fleet)
    memories: dict[str, EngineMemory] = field(default_factory=dict)
    looks: int = 0
    _polled: dict[tuple[int, str], _Polled] = field(default_factory=dict)
    _queue: list[tuple[float, int, str, tuple[int, str], int]] = field(default_factory=list)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)
    _last_look: float = 0.0
    _look_due: float | None = None
    _tapes: dict[str, Tape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for exporter in self.exporters:
            track = ExporterTrack(DEPLOYMENT, exporter.url, token=True, since=moment(self.since).monotonic)
            self.fleet.add(track)
            for path, period in ((RANKS_PATH, RANKS_SECONDS), (STEPS_PATH, POLL_SECONDS)):
                polled = self._polled[exporter.node, path] = _Polled(exporter, track, path, period)
                # Ranks are asked for once before the loops begin.
                self._ask(polled, self.since + self.random.uniform(0, 0.05) + (path == STEPS_PATH) * 0.1)
        self._want_look(self.since + LOOK_SECONDS)

    def run(self, until: float) -> bool:
        """
        Go on until a second of the simulated world; whether `seen` has said that it was enough.
        """
        while self._queue and self._queue[0][0] <= until:
            at, _, what, key, number = heapq.heappop(self._queue)
            if what == "look":
                if self._look_due == at and self._look(at):
                    return True
            elif self._polled[key].number == number:
                self._poll(self._polled[key], at)
            elif number < 0:  # the answer of a poll that is under way
                self._arrive(self._polled[key], at, ~number)
        return False

    def _push(self, at: float, what: str, key: tuple[int, str], number: int) -> None:
        heapq.heappush(self._queue, (at, next(self._order), what, key, number))

    def _ask(self, polled: _Polled, at: float) -> None:
        polled.number += 1
        self._push(at, "poll", (polled.exporter.node, polled.path), polled.number)

    def _poll(self, polled: _Polled, at: float) -> None:
        """
        Ask an exporter: its answer arrives a little later, or an error does.
        """
        polled.number += 1
        outage = polled.exporter.outage(at)
        wait = self.random.expovariate(1 / 0.004) + (
            self.random.uniform(0.05, 0.5) if self.random.random() < 0.01 else 0.0
        )
        if outage is not None:
            wait = min(outage.end - at + wait, TIMEOUT_SECONDS) if outage.hangs else 0.001
        self._push(at + wait, "answer", (polled.exporter.node, polled.path), ~polled.number)

    def _arrive(self, polled: _Polled, at: float, number: int) -> None:
        track, path = polled.track, polled.path
        outage = polled.exporter.outage(at)
        hurried = False
        if outage is None:
            hurried = self._take(polled, at)
            polled.failures = 0
            polled.answered = at
            track.errors.pop(path, None)
            track.answered[path] = moment(at).monotonic
        else:
            polled.failures += 1
            track.errors[path] = f"no answer within {TIMEOUT_SECONDS:g} s" if outage.hangs else "connection refused"
        self._want_look(max(at, self._last_look + PULSE_SECONDS))
        self._ask(polled, at + back_off(polled.failures, polled.period, self.random.random()))
        if hurried:
            self._ask(self._polled[polled.exporter.node, RANKS_PATH], at)

    def _take(self, polled: _Polled, at: float) -> bool:
        """
        Take an answer in; whether ranks are to be asked for at once.
        """
        track, exporter = polled.track, polled.exporter
        read = at - min(self.random.expovariate(1 / 0.004), 0.1)  # what it says was so a moment ago
        if polled.path == RANKS_PATH:
            track.absorb_ranks(exporter.ranks(read), moment(at))
            return False
        restarted = polled.answered is not None and any(
            outage.restarts and polled.answered < outage.end <= at for outage in exporter.outages
        )
        if track.refetch or restarted:
            track.cursor, track.refetch = "", False
        lost = track.lost
        frame = StepsFrame.decode(exporter.steps(read, track.cursor))
        ask = track.absorb_steps(frame, moment(at))
        self.counts[Oddity.RECORDS_LOST] += track.lost - lost
        self._note(exporter, frame)
        return ask

    def _note(self, exporter: MadeExporter, frame: StepsFrame) -> None:
        """
        Note on the tapes which records have arrived whole.
        """
        for head, records in zip(frame.header.ranks, frame.records, strict=True):
            if not len(records):
                continue
            tape = self._tapes.get(head.key)
            if tape is None:
                tape = self._tapes[head.key] = next(tape for tape in exporter.tapes if tape.key == head.key)
            whole = records["step"][records["phase"] == Phase.DONE].astype(np.int64) - 1
            self.counts[Oddity.REPEATED] += int(tape.delivered[whole].sum())
            tape.delivered[whole] = True

    def _want_look(self, at: float) -> None:
        if self._look_due is None or at < self._look_due:
            self._look_due = at
            self._push(at, "look", (0, ""), 0)

    def _look(self, at: float) -> bool:
        self._look_due = None
        self._last_look = at
        self.looks += 1
        enough = False
        now = moment(at)
        engines = self.fleet.engines(DEPLOYMENT)
        for engine in engines:
            before = self.memories.get(engine.engine, EngineMemory())
            after = self.memories[engine.engine] = assess(engine, before, now)
            steps = [rank.history.last for rank in engine.ranks]
            self.counts[Oddity.SKEW] += max(steps) - min(steps) >= 2
            enough = self.seen(Look(at, engine, before, after, self._blind_due(engine, at))) or enough
        for name in set(self.memories) - {engine.engine for engine in engines}:
            del self.memories[name]
        self._want_look(at + LOOK_SECONDS)
        return enough

    def _blind_due(self, engine: EngineFacts, at: float) -> bool:
        """
        Whether an exporter of the engine has failed to answer and been silent for too long, by what the simulation knows, or
        part of the engine has not been seen for long.
        """
        if engine.ended:
            return False
        for exporter in {rank.exporter for rank in engine.ranks}:
            paths = [one for one in self._polled.values() if one.exporter.url == exporter]
            silent = at - min(self.since if one.answered is None else one.answered for one in paths)
            if silent > (REACH_SECONDS if any(one.failures for one in paths) else SILENT_SECONDS):
                return True
        # Ranks of which nobody has spoken yet, as the exporter of their node is silent since before they came up.
        waited = moment(at).monotonic - max(rank.first_seen for rank in engine.ranks)
        return engine.missing > 0 and waited > GRACE_SECONDS
