"""
The step records of one rank that the server holds.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Phase
from rankscope_exporter.flight.layout import MAX_EFFECTIVE_STEP, STEP_DTYPE

CAPACITY = 4096
"""
Steps that are held per rank; as many as a flight file holds.
"""

CHANGES_HELD = 64
"""
Answers of an exporter of which it is remembered where they begin; whoever looks less often looks at everything.
"""

Records = npt.NDArray[np.void]

OPAQUE = np.dtype(f"V{STEP_DTYPE.itemsize}")
"""
A record as bytes that nobody looks into: NumPy copies those ten times as fast as records with fields.
"""

_REVISIONS = itertools.count(1)

# Plain numbers: NumPy takes four times as long to compare with a member of an enumeration.
_WRITING, _DONE = int(Phase.WRITING), int(Phase.DONE)


class Head(NamedTuple):
    """
    What is looked at most of a rank's newest step, in plain numbers; times in nanoseconds of the node's clock.
    """

    step: int
    begin_ns: int
    decide_ns: int
    end_ns: int
    mitigation: int
    lengths: int
    guard: int
    failed: int
    phase: int


class StepHistory:
    """
    The last steps of a rank, by ordinal. A record replaces the one of the same step if it is a later phase of it, or if
    the step has failed since.
    """

    __slots__ = (
        "_changes",
        "_forgotten",
        "_head",
        "_heads",
        "_opaque",
        "_ring",
        "capacity",
        "first",
        "last",
        "revision",
    )

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.first = 0
        """Ordinal of the first step that was ever absorbed; 0 before that."""
        self.last = 0
        """Ordinal of the newest step; 0 before the first."""
        self.revision = 0
        """Goes up whenever something new was absorbed; no two histories ever have the same one."""
        self._ring = np.zeros(capacity, STEP_DTYPE)
        self._opaque = self._ring.view(OPAQUE)
        self._heads = self._ring[list(Head._fields)]
        self._head: Head | None = None
        self._changes: deque[tuple[int, int]] = deque()
        """Revisions, and the lowest step that each brought or changed."""
        self._forgotten = 0
        """The last revision that is no longer among them."""

    def absorb(self, records: Records) -> Records:
        """
        Take records in; those that brought something new, oldest first.

        Records that cannot be (step 0, no phase, absurd ordinals) are left out: they come from another process's memory.
        """
        records = _sane(records)
        if len(records) == 0:
            return records
        step = records["step"]
        lowest, newest = int(step.min()), max(self.last, int(step.max()))
        if lowest + self.capacity <= newest:
            return self.absorb(_where(records, step + np.uint64(self.capacity) > newest))
        phase, failed = records["phase"], records["failed"]
        slots = (step % np.uint64(self.capacity)).astype(np.intp)
        held = self._opaque[slots].view(STEP_DTYPE)
        fresh = (held["step"] != step) | (held["phase"] < phase)
        if failed.any():
            fresh |= (held["phase"] == phase) & (held["failed"] < failed)
        if not fresh.all():
            records, slots = _where(records, fresh), slots[fresh]
            if len(records) == 0:
                return records
            lowest = int(records["step"].min())
        self._opaque[slots] = records.view(OPAQUE)
        self.last = newest
        self.first = self.first or lowest
        if len(self._changes) == CHANGES_HELD:
            self._forgotten = self._changes.popleft()[0]
        self.revision = next(_REVISIONS)
        self._changes.append((self.revision, lowest))
        self._head = None
        return records

    def changed_since(self, revision: int) -> int:
        """
        The lowest step that was brought or changed after `revision`; that of the oldest step held where it is not known.
        """
        if revision < self._forgotten:
            return max(self.first, self.last - self.capacity + 1)
        first = self.last + 1
        for at, lowest in reversed(self._changes):
            if at <= revision:
                break
            first = min(first, lowest)
        return first

    def copy_to(self, opaque: Records, first: int) -> None:
        """
        Copy the slots of the steps from `first` on to `opaque` (`OPAQUE`, no longer than the ring): whatever they hold, be
        it an older step.
        """
        begin, count = first % self.capacity, len(opaque)
        until_end = self.capacity - begin
        if count <= until_end:
            opaque[:] = self._opaque[begin : begin + count]
        else:
            opaque[:until_end] = self._opaque[begin:]
            opaque[until_end:] = self._opaque[: count - until_end]

    def take(self, steps: npt.NDArray[np.uint64]) -> Records:
        """
        Records of `steps`; all zero where there is none.
        """
        opaque = self._opaque[(steps % np.uint64(self.capacity)).astype(np.intp)]
        records = opaque.view(STEP_DTYPE)
        opaque[records["step"] != steps] = np.zeros((), OPAQUE)
        return records

    def tail(self, count: int) -> Records:
        """
        The newest records, at most `count` steps back, oldest first, without holes.
        """
        if self.last == 0:
            return np.zeros(0, STEP_DTYPE)
        first = max(1, self.last - min(count, self.capacity) + 1)
        records = np.empty(self.last - first + 1, STEP_DTYPE)
        self.copy_to(records.view(OPAQUE), first)
        return _where(records, records["step"] == np.arange(first, self.last + 1, dtype=np.uint64))

    def newest(self) -> np.void | None:
        """
        The record of the newest step; None before the first.
        """
        return self._ring[self.last % self.capacity].copy() if self.last else None

    @property
    def head(self) -> Head | None:
        """The newest step in short; None before the first."""
        if self._head is None and self.last:
            self._head = Head._make(self._heads.item(self.last % self.capacity))
        return self._head

    def backwards(self, count: int) -> Iterator[np.void]:
        """
        The newest records, newest first.
        """
        yield from self.tail(count)[::-1]


def _sane(records: Records) -> Records:
    """
    Those records that can be of a rank.
    """
    if len(records) == 0:
        return records
    step, phase = records["step"], records["phase"]
    if step.min() > 0 and step.max() <= MAX_EFFECTIVE_STEP and phase.min() > _WRITING and phase.max() <= _DONE:
        return records
    return _where(records, (step > 0) & (step <= MAX_EFFECTIVE_STEP) & (phase > _WRITING) & (phase <= _DONE))


def _where(records: Records, which: npt.NDArray[np.bool_]) -> Records:
    """
    The records for which it holds, without a copy where it holds for all.
    """
    if which.all():
        return records
    held: Records = np.ascontiguousarray(records).view(OPAQUE)[which].view(STEP_DTYPE)
    return held
