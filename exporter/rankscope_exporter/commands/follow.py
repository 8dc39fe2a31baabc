"""
Following a rank from look to look: which steps have ended since, which were lost in between, what became of its process.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract.words import Phase, RankLife

STANDING_SECONDS = 2.0
"""
A step that has not moved for so long is told of once for each phase.
"""


@dataclass(frozen=True, slots=True)
class Look:
    """
    A rank at one moment: `last_step` was read before `records`, which hold what came after the last step that was told.
    """

    last_step: int
    records: npt.NDArray[np.void]
    life: RankLife
    now: float


@dataclass(frozen=True, slots=True)
class Ended:
    """
    A step that will not change any more: it is done, it failed, or the rank went on without it.
    """

    record: np.void


@dataclass(frozen=True, slots=True)
class Lost:
    """
    Steps that the ring had room for no more when it was looked at.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Standing:
    """
    The step in flight has not moved for `seconds`.
    """

    record: np.void
    seconds: float


@dataclass(frozen=True, slots=True)
class LifeChanged:
    """
    The rank's process was stopped, continued, or is gone.
    """

    life: RankLife
    step: int


Event = Ended | Lost | Standing | LifeChanged


class Follower:
    """
    Tells each step of a rank once, in order. `told` is the last step that need not be told any more.
    """

    def __init__(self, told: int = 0) -> None:
        self.told = told
        self._life = RankLife.RUNNING
        self._standing: tuple[int, int] = (0, 0)
        self._since = 0.0
        self._said = False
        self._empty_at = 0

    def look(self, look: Look) -> Iterator[Event]:
        """
        What there is to tell since the last look.
        """
        newest: np.void | None = None
        for record in look.records:
            step = int(record["step"])
            if step <= self.told:
                continue
            # A step before the last one is over, whatever phase it came to.
            if record["phase"] < Phase.DONE and not record["failed"] and step >= look.last_step:
                newest = record
                break
            yield from self._missed(step)
            self.told = step
            yield Ended(record)
        if newest is not None:
            yield from self._missed(int(newest["step"]))
            yield from self._stands(newest, look.now)
        elif len(look.records):
            self._empty_at = 0
        elif look.last_step > self.told + 1:
            # All of it was overwritten while it was read, and comes with the next look; or it cannot be read at all.
            if look.last_step == self._empty_at:
                yield from self._missed(look.last_step)
            self._empty_at = look.last_step
        if look.life is not self._life:
            self._life = look.life
            yield LifeChanged(look.life, look.last_step)

    def _missed(self, step: int) -> Iterator[Event]:
        """
        Steps before `step` that have not been told will not come any more.
        """
        if step > self.told + 1:
            yield Lost(self.told + 1, step - 1)
            self.told = step - 1

    def _stands(self, record: np.void, now: float) -> Iterator[Event]:
        place = int(record["step"]), int(record["phase"])
        if place != self._standing:
            self._standing, self._since, self._said = place, now, False
        elif not self._said and now - self._since >= STANDING_SECONDS:
            self._said = True
            yield Standing(record, now - self._since)


def told_at_start(records: npt.NDArray[np.void], last_step: int, *, from_start: bool) -> int:
    """
    What counts as told when a rank is met first: all but the step in flight, or nothing that the ring still holds.
    """
    if from_start:
        return int(records["step"][0]) - 1 if len(records) else last_step
    if len(records) and records["phase"][-1] < Phase.DONE and not records["failed"][-1]:
        return int(records["step"][-1]) - 1
    return last_step
