"""
The steps of several ranks side by side, and where they part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract.words import Guard, Phase

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Alignment:
    """
    `rows[rank][i]` is the record of step `steps[i]`, -1 where the rank's file has none; `differs[what][i]` whether ranks
    differ in it there.
    """

    steps: npt.NDArray[np.uint64]
    rows: list[npt.NDArray[np.int64]]
    differs: dict[str, Bools]

    @property
    def shared(self) -> int:
        """How many steps at least two ranks hold."""
        return int(np.count_nonzero(np.sum([row >= 0 for row in self.rows], axis=0) >= 2))

    def differences(self, index: int) -> list[str]:
        """In what the ranks differ at `steps[index]`."""
        return [what for what, where in self.differs.items() if where[index]]

    @property
    def first(self) -> int | None:
        """Index of the first step in which two ranks differ; None if there is none."""
        anywhere = np.logical_or.reduce(list(self.differs.values()))
        found = np.flatnonzero(anywhere)
        return int(found[0]) if len(found) else None


def align(ranks: Sequence[npt.NDArray[np.void]]) -> Alignment:
    """
    Align the records of at least two ranks of one engine by the ordinal of the step, which is equal on all of them.

    Compared is what has to be equal: the batch, the guard decision, who is masked, the width and the number of collectives
    posted. What a rank does not know differs from nothing. Lengths are not compared: a rank drifts against the scheduler.
    """
    steps = np.unique(np.concatenate([records["step"] for records in ranks]))
    rows = []
    for records in ranks:
        row = np.full(len(steps), -1, np.int64)
        row[np.searchsorted(steps, records["step"])] = np.arange(len(records))
        rows.append(row)
    known = {
        "batch": ("batch_hash", [np.ones(len(r), bool) for r in ranks]),
        "guard": ("guard", [_decided(r) for r in ranks]),
        "mask": ("mask_hash", [_decided(r) & (r["mask_known"] > 0) for r in ranks]),
        "width": ("width", [_decided(r) & (r["width"] > 0) for r in ranks]),
        "posted": ("posted", [_decided(r) & (r["phase"] == Phase.DONE) for r in ranks]),
    }
    differs = {
        what: _differs([r[name] for r in ranks], masks, rows, len(steps)) for what, (name, masks) in known.items()
    }
    return Alignment(steps, rows, differs)


def _decided(records: npt.NDArray[np.void]) -> Bools:
    decided: Bools = (records["phase"] >= Phase.DECIDED) & (records["guard"] != Guard.NONE)
    return decided


def _differs(
    values: Sequence[npt.NDArray[np.void]], known: Sequence[Bools], rows: Sequence[npt.NDArray[np.int64]], count: int
) -> Bools:
    differs = np.zeros(count, bool)
    seen = np.zeros(count, bool)
    first = np.zeros(count, np.uint64)
    for value, mask, row in zip(values, known, rows, strict=True):
        here = np.flatnonzero(row >= 0)
        here = here[mask[row[here]]]
        own = value[row[here]].astype(np.uint64)
        differs[here] |= seen[here] & (first[here] != own)
        first[here] = np.where(seen[here], first[here], own)
        seen[here] = True
    return differs
