"""
The exporter of a made node: what it answers at any moment, and when it does not.

Answers of steps are put together by the exporter's own code, cursor and all; only the flight files under it are tapes.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import sim_oddities as odds
from made_ranks import START_UNIX
from sim_oddities import Counts, Oddity
from sim_ranks import NEVER, Records, Tape

from rankscope_exporter.contract import RanksAnswer, StepsFrame
from rankscope_exporter.flight import FlightFile
from rankscope_exporter.serve.steps import RankSteps, assemble

RESTART_SECONDS = (0.2, 2.5)
"""
What an exporter takes to come up again, at least and at most.
"""


@dataclass(frozen=True, slots=True)
class Outage:
    """
    A time in which an exporter does not answer.
    """

    begin: float
    end: float
    hangs: bool
    """Whether it takes requests and answers none, so that the one who asks waits; else it refuses at once."""
    restarts: bool = False
    """Whether another process answers afterwards, to which old cursors say nothing."""


@dataclass(frozen=True, slots=True)
class FileAt:
    """
    A flight file at one moment, with what the exporter's code asks of one.
    """

    tape: Tape
    at: float
    torn: bool
    """Whether the newest record is just being begun."""

    @property
    def key(self) -> str:
        """Name of the file."""
        return self.tape.key

    def step(self) -> int:
        """
        The last step begun.
        """
        return self.tape.newest(self.at)

    def records(self, after: int = 0) -> Records:
        """
        What the ring holds after a step.
        """
        records = self.tape.read(self.at, after)
        return records[:-1] if self.torn else records


@dataclass(slots=True)
class MadeExporter:
    """
    One node's exporter.
    """

    node: int
    random: Random
    counts: Counts
    clock_ns: int
    """What the node's monotonic clock says at second 0."""
    unix_offset: float
    """How far its wall clock is ahead of the server's."""
    tapes: list[Tape] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    jumps: list[tuple[float, float]] = field(default_factory=list)
    """When its wall clock is set, and by how many seconds."""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://node-{self.node}:9610"

    def outage(self, at: float) -> Outage | None:
        """
        The outage that holds at a moment; None while it answers.
        """
        return next((outage for outage in self.outages if outage.begin <= at < outage.end), None)

    def unix(self, at: float) -> float:
        """
        What its wall clock says.
        """
        return START_UNIX + at + self.unix_offset + sum(by for when, by in self.jumps if when <= at)

    def monotonic_ns(self, at: float) -> int:
        """
        What its monotonic clock says.
        """
        return self.clock_ns + int(at * 1e9)

    def _files(self, at: float) -> list[Tape]:
        return [tape for tape in self.tapes if tape.born <= at < tape.removed]

    def steps(self, at: float, cursor: str) -> bytes:
        """
        The answer of `/v1/steps`, as it goes over the wire.
        """
        ranks = []
        for tape in self._files(at):
            torn = tape.begins(at) and self.random.random() < odds.TORN
            self.counts[Oddity.TORN] += torn
            file = cast("FlightFile", FileAt(tape, at, torn))
            ranks.append(RankSteps(file, tape.report.identity, tape.life(at)))
        frame: StepsFrame = assemble(
            ranks, cursor or None, node=f"node-{self.node}", monotonic_ns=self.monotonic_ns(at), unix=self.unix(at)
        )
        return frame.encode()

    def ranks(self, at: float) -> RanksAnswer:
        """
        The answer of `/v1/ranks`.
        """
        answer: dict[str, Any] = {
            "node": f"node-{self.node}", "exporter_version": "0.1.0", "monotonic_ns": self.monotonic_ns(at), "unix": self.unix(at),
            "flight_dir": "/dev/shm/rankscope", "control": True, "ranks": [tape.report_at(at) for tape in self._files(at)], "unreadable": [],
        }  # fmt: skip
        return RanksAnswer.model_construct(**answer)


def draw_troubles(exporter: MadeExporter, until: float) -> None:
    """
    Silences, restarts and set clocks of an exporter over its time; outages are apart by seconds at least.

    Files say when they were made by the clock as it was set then.
    """
    random, counts = exporter.random, exporter.counts
    at = random.expovariate(1 / odds.SILENCE_SECONDS)
    restart = random.expovariate(1 / odds.EXPORTER_RESTART_SECONDS)
    while min(at, restart) < until:
        if at < restart:
            seconds = random.uniform(6, 30) if random.random() < odds.SILENCE_LONG else random.uniform(1, 6)
            exporter.outages.append(Outage(at, at + seconds, hangs=random.random() < 0.4))
            at += seconds + 6 + random.expovariate(1 / odds.SILENCE_SECONDS)
            restart = max(restart, exporter.outages[-1].end + 6)
            counts[Oddity.SILENCE] += 1
        else:
            seconds = random.uniform(*RESTART_SECONDS)
            exporter.outages.append(Outage(restart, restart + seconds, hangs=False, restarts=True))
            restart += seconds + 6 + random.expovariate(1 / odds.EXPORTER_RESTART_SECONDS)
            at = max(at, exporter.outages[-1].end + 6)
            counts[Oddity.EXPORTER_RESTART] += 1
    jump = random.expovariate(1 / odds.CLOCK_JUMP_SECONDS)
    while jump < until:
        exporter.jumps.append((jump, random.choice((-1, 1)) * 10 ** random.uniform(0, 3.6)))
        counts[Oddity.CLOCK_JUMP] += 1
        jump += random.expovariate(1 / odds.CLOCK_JUMP_SECONDS)
    for tape in exporter.tapes:
        tape.report = tape.report.model_copy(update={"started_unix": exporter.unix(tape.born)})


def clear_outages(exporter: MadeExporter, since: float) -> None:
    """
    Take out the outages that last beyond a moment, but for one that never ends.
    """
    exporter.outages = [one for one in exporter.outages if one.end < since or one.end == NEVER]


def go_silent(exporter: MadeExporter, at: float, *, hangs: bool) -> None:
    """
    Answer nothing any more from a moment on.
    """
    exporter.outages = [one for one in exporter.outages if one.end < at]
    exporter.outages.append(Outage(at, NEVER, hangs=hangs))
