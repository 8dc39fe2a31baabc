"""
When what a step record says was known: the times at which its parts were written, and the record as it stood then.
"""

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Phase
from rankscope_exporter.flight import layout
from rankscope_server.domain.history import Records, StepHistory

Nanoseconds = npt.NDArray[np.int64]

_PARTS = (
    (Phase.SCHEDULED, layout.PART_STATE_OFFSET),
    (Phase.STATE_UPDATED, layout.PART_DECIDED_OFFSET),
    (Phase.DECIDED, layout.PART_DONE_OFFSET),
)
"""
Where a record ends that has come as far as a phase.
"""


MAX_NS = 1 << 61
"""
No node has been up for so long: 73 years.
"""


class Timeline:
    """
    The records of one rank, oldest first, given to a history as time passes.

    `since` is the time of its node's monotonic clock at which the file was made; records that claim to be older, or are of
    a time that no clock shows, are left out and counted.
    """

    __slots__ = ("_decided", "_given", "_known", "_records", "begun", "ended", "left_out")

    def __init__(self, records: Records, since: int) -> None:
        sane = records["begin_ns"] >= since
        for name in ("begin_ns", "decide_ns", "end_ns"):
            sane &= records[name] < MAX_NS
        self._records = records[sane]
        self.left_out = int(len(records) - len(self._records))
        """Records whose times make no sense."""
        # A clock never goes back, and what was written later was not known earlier.
        self.begun: Nanoseconds = np.maximum.accumulate(self._records["begin_ns"].astype(np.int64))
        """When each step began, in nanoseconds of the node's monotonic clock."""
        self._decided = np.maximum(self.begun, self._records["decide_ns"].astype(np.int64))
        self.ended: Nanoseconds = np.maximum(self._decided, self._records["end_ns"].astype(np.int64))
        """When the last thing was written into each record."""
        self._given = 0
        self._known = np.zeros(len(self._records), np.uint8)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> Records:
        """All of them, as they stand at the end."""
        return self._records

    @property
    def moments(self) -> Nanoseconds:
        """Every time at which something new was known, in order."""
        return np.unique(np.concatenate([self.begun, self._decided, self.ended]))

    @property
    def last_ns(self) -> int | None:
        """When the rank did the last thing that is known of it; None if that is nothing."""
        return int(self.ended.max()) if len(self._records) else None

    def give(self, history: StepHistory, until: int) -> bool:
        """
        Have `history` absorb what was known at `until`, and was not given before; whether there was any.
        """
        end = int(np.searchsorted(self.begun, until, side="right"))
        if end == self._given:
            return False
        window = slice(self._given, end)
        phases = self._phases(window, until)
        fresh = phases > self._known[window]
        anything = bool(fresh.any())
        if anything:
            history.absorb(as_of(self._records[window][fresh], phases[fresh]))
            self._known[window] = phases
        # A step whose last word has been given is never looked at again.
        final = phases >= self._records["phase"][window]
        self._given += len(final) if final.all() else int(final.argmin())
        return anything

    def _phases(self, window: slice, until: int) -> npt.NDArray[np.uint8]:
        """
        How far the steps in `window`, all of which had begun, had come at `until`.
        """
        last = self._records["phase"][window]
        # Nothing says when the request state was updated: at the beginning of a step, which is close enough.
        phases = np.minimum(last, int(Phase.STATE_UPDATED))
        phases = np.where(self._decided[window] <= until, np.minimum(last, int(Phase.DECIDED)), phases)
        phases = np.where(self.ended[window] <= until, last, phases)
        answer: npt.NDArray[np.uint8] = phases.astype(np.uint8)
        return answer


def as_of(records: Records, phases: npt.NDArray[np.uint8]) -> Records:
    """
    `records` as readers had them in an earlier phase: later parts are zero, and no step has failed before its end.
    """
    raw = np.ascontiguousarray(records).copy().view(np.uint8).reshape(len(records), layout.STEP_DTYPE.itemsize)
    for phase, end in _PARTS:
        raw[phases == phase, end : layout.FAILED_OFFSET] = 0
    raw[phases < records["phase"], layout.FAILED_OFFSET] = 0
    answer: Records = raw.view(layout.STEP_DTYPE).reshape(-1)
    answer["phase"] = phases
    return answer
