"""
Ranks of an engine beside each other, step by step.

Ordinals are the only thing that aligns ranks: they run pp_size + 1 steps apart in good health, and their clocks are
those of different nodes. What a rank has not reached yet is unknown, and unknown never disagrees with anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Guard, Lengths, Phase
from rankscope_exporter.flight.layout import STEP_DTYPE
from rankscope_server.domain.history import OPAQUE, Records, StepHistory

Bools = npt.NDArray[np.bool_]

BLOCK_RECORDS = 1 << 15
"""
Records that are compared in one go (7 MB): an engine with many ranks, or much to catch up with, takes several.
"""

# Plain numbers: NumPy takes four times as long to compare with a member of an enumeration.
_STATE_UPDATED, _DECIDED = int(Phase.STATE_UPDATED), int(Phase.DECIDED)
_BROADCAST, _DECISIONS, _OUTPUT_TOKENS = np.uint8(Guard.BROADCAST), 2, int(Lengths.OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True)
class Aligned:
    """
    Records of several ranks over the same steps.
    """

    steps: npt.NDArray[np.uint64]
    records: Records
    """One row per rank, one column per step; `step` is 0 where there is no record."""

    def reached(self, phase: Phase) -> Bools:
        """
        Where a rank is known to have come at least as far as `phase`.
        """
        return np.asarray(self.records["phase"] >= int(phase))

    @property
    def decided(self) -> Bools:
        """Where a rank is known to have decided about the collective; a word that nobody knows is no decision."""
        known = (
            self.records["guard"] - _BROADCAST < _DECISIONS
        )  # one comparison, as no decision wraps round to the largest byte
        return np.asarray((self.records["phase"] >= _DECIDED) & known)

    @property
    def mask_known(self) -> Bools:
        """Where it is known which requests a rank masked."""
        return np.asarray((self.records["phase"] >= _DECIDED) & (self.records["mask_known"] == 1))

    @property
    def measured(self) -> Bools:
        """Where a rank's request-state lengths are known, and can drift: copies of the scheduler's cannot."""
        return np.asarray((self.records["phase"] >= _STATE_UPDATED) & (self.records["lengths"] == _OUTPUT_TOKENS))


def tails(histories: Sequence[StepHistory], count: int) -> Records:
    """
    The newest steps of each rank, oldest first, at most `count`: one row per rank, whose columns are not the steps of other
    rows; all zero where there is no record.
    """
    count = min(count, *(history.capacity for history in histories))
    opaque = np.empty((len(histories), count), OPAQUE)
    for history, row in zip(histories, opaque, strict=True):
        history.copy_to(row, history.last - count + 1)
    records = opaque.view(STEP_DTYPE)
    last = np.array([history.last for history in histories], np.int64)
    steps = last[:, np.newaxis] + np.arange(1 - count, 1)
    opaque[(records["step"] != np.maximum(steps, 0).astype(np.uint64)) | (steps <= 0)] = np.zeros((), OPAQUE)
    return records


def parted(aligned: Aligned) -> bool:
    """
    Whether ranks are known to differ in batch, mask or guard at any step: one look at all three, as they hardly ever do.
    """
    records = aligned.records
    words = np.empty((3, *records.shape), np.uint64)
    words[0], words[1], words[2] = records["batch_hash"], records["mask_hash"], records["guard"]
    known = np.empty(words.shape, np.bool_)
    known[0], known[1], known[2] = records["phase"], aligned.mask_known, aligned.decided
    return bool(differing(words, known).any())


def align(histories: Sequence[StepHistory], first: int, last: int) -> Aligned:
    """
    The records of all ranks from step `first` to step `last`, both included; no more steps than a history holds.
    """
    steps = np.arange(max(first, 1), max(last, 0) + 1, dtype=np.uint64)
    opaque = np.empty((len(histories), len(steps)), OPAQUE)
    for history, row in zip(histories, opaque, strict=True):
        history.copy_to(row, max(first, 1))
    records = opaque.view(STEP_DTYPE)
    absent = records["step"] != steps
    if absent.any():
        opaque[absent] = np.zeros((), OPAQUE)
    return Aligned(steps, records)


def align_blocks(histories: Sequence[StepHistory], first: int, last: int, before: int) -> Iterator[Aligned]:
    """
    The same, oldest first, in pieces that do not grow with the number of ranks. Each begins with the `before` steps in
    front of it, for those to whom neighbours matter. What a ring no longer holds is left out.
    """
    held = min(history.capacity for history in histories)
    first = max(first, 1, last - held + 1)
    size = min(max(BLOCK_RECORDS // len(histories), 16), held - before)
    for begin in range(first, last + 1, size):
        yield align(histories, begin - before, min(begin + size - 1, last))


def newest_step(histories: Sequence[StepHistory]) -> int:
    """
    The newest step that any rank began; 0 if none did.
    """
    return max((history.last for history in histories), default=0)


def differing(values: npt.NDArray[np.unsignedinteger], known: Bools) -> Bools:
    """
    Steps at which two ranks are known to hold different values; ranks are the last axis but one, steps the last.
    """
    least = np.minimum.reduce(values, axis=-2, where=known, initial=np.iinfo(values.dtype).max)
    most = np.maximum.reduce(values, axis=-2, where=known, initial=0)
    return np.asarray(least < most)
