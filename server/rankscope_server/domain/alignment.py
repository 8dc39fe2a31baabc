"""
Ranks of an engine beside each other, step by step.

Ordinals are the only thing that aligns ranks: they run pp_size + 1 steps apart in good health, and their clocks are
those of different nodes. What a rank has not reached yet is unknown, and unknown never disagrees with anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Guard, Lengths, Phase
from rankscope_server.domain.history import Records, StepHistory

Bools = npt.NDArray[np.bool_]


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
        return np.asarray(self.records["phase"] >= phase)

    @property
    def decided(self) -> Bools:
        """Where a rank is known to have decided about the collective."""
        return np.asarray(self.reached(Phase.DECIDED) & (self.records["guard"] != Guard.NONE))

    @property
    def mask_known(self) -> Bools:
        """Where it is known which requests a rank masked."""
        return np.asarray(self.reached(Phase.DECIDED) & (self.records["mask_known"] == 1))

    @property
    def measured(self) -> Bools:
        """Where a rank's request-state lengths are known, and can drift: copies of the scheduler's cannot."""
        return np.asarray(self.reached(Phase.STATE_UPDATED) & (self.records["lengths"] == Lengths.OUTPUT_TOKENS))


def align(histories: Sequence[StepHistory], first: int, last: int) -> Aligned:
    """
    The records of all ranks from step `first` to step `last`, both included.
    """
    steps = np.arange(max(first, 1), max(last, 0) + 1, dtype=np.uint64)
    return Aligned(steps, np.stack([history.take(steps) for history in histories]))


def newest_step(histories: Sequence[StepHistory]) -> int:
    """
    The newest step that any rank began; 0 if none did.
    """
    return max((history.last for history in histories), default=0)


def settled_step(aligned: Aligned, settled: int) -> int:
    """
    The last step up to which nothing can change any more: every rank's record is there and done.

    `settled` is what held before `aligned`, which begins right after it. Holes that will never be filled (records that
    a ring lost) must not hold it back: a rank that has a later record done has nothing more to say about earlier ones.
    """
    if aligned.steps.size == 0:
        return settled
    done = aligned.reached(Phase.DONE)
    last_done = np.where(
        done.any(axis=1), aligned.steps[aligned.steps.size - 1 - done[:, ::-1].argmax(axis=1)], settled
    )
    return int(last_done.min())


def differing(values: npt.NDArray[np.unsignedinteger], known: Bools) -> Bools:
    """
    Steps at which two ranks are known to hold different values.
    """
    wide = values.astype(np.uint64)
    least = np.where(known, wide, np.iinfo(np.uint64).max).min(axis=0)
    most = np.where(known, wide, 0).max(axis=0)
    return np.asarray((known.sum(axis=0) > 1) & (least < most))
