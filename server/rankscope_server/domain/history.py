"""
The step records of one rank that the server holds.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Phase
from rankscope_exporter.flight.layout import MAX_EFFECTIVE_STEP, STEP_DTYPE

CAPACITY = 4096
"""
Steps that are held per rank; as many as a flight file holds.
"""

Records = npt.NDArray[np.void]


class StepHistory:
    """
    The last steps of a rank, by ordinal. A record replaces the one of the same step if it is a later phase of it, or if
    the step has failed since.
    """

    __slots__ = ("_ring", "capacity", "first", "last")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.first = 0
        """Ordinal of the first step that was ever absorbed; 0 before that."""
        self.last = 0
        """Ordinal of the newest step; 0 before the first."""
        self._ring = np.zeros(capacity, STEP_DTYPE)

    def absorb(self, records: Records) -> Records:
        """
        Take records in; those that brought something new, oldest first.

        Records that cannot be (step 0, no phase, absurd ordinals) are left out: they come from another process's memory.
        """
        step = records["step"]
        phase = records["phase"]
        sane = (step > 0) & (step <= MAX_EFFECTIVE_STEP) & (phase > Phase.WRITING) & (phase <= Phase.DONE)
        records = records[sane]
        if len(records) == 0:
            return records
        newest = max(self.last, int(records["step"].max()))
        records = records[records["step"] + np.uint64(self.capacity) > newest]
        slots = records["step"] % np.uint64(self.capacity)
        held = self._ring[slots]
        fresh = (held["step"] != records["step"]) | (held["phase"] < records["phase"])
        fresh |= (held["phase"] == records["phase"]) & (held["failed"] < records["failed"])
        records = records[fresh]
        self._ring[slots[fresh]] = records
        self.last = newest
        if self.first == 0 and len(records):
            self.first = int(records["step"].min())
        return records

    def take(self, steps: npt.NDArray[np.uint64]) -> Records:
        """
        Records of `steps`; all zero where there is none.
        """
        records = self._ring[steps % np.uint64(self.capacity)]
        records[records["step"] != steps] = np.zeros((), STEP_DTYPE)
        return np.asarray(records)

    def tail(self, count: int) -> Records:
        """
        The newest records, at most `count` steps back, oldest first, without holes.
        """
        if self.last == 0:
            return np.zeros(0, STEP_DTYPE)
        first = max(1, self.last - min(count, self.capacity) + 1)
        records = self.take(np.arange(first, self.last + 1, dtype=np.uint64))
        held: Records = records[records["step"] > 0]
        return held

    def newest(self) -> np.void | None:
        """
        The record of the newest step; None before the first.
        """
        return self._ring[self.last % self.capacity].copy() if self.last else None

    def backwards(self, count: int) -> Iterator[np.void]:
        """
        The newest records, newest first.
        """
        yield from self.tail(count)[::-1]
