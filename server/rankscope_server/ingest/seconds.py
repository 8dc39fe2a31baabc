"""
Largest drift per second, per rank: what charts and sparklines are made of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Lengths, Phase
from rankscope_server.domain.history import Records

SECONDS_HELD = 3600


@dataclass(frozen=True, slots=True)
class Sample:
    """
    One second of one rank.
    """

    second: int
    drift_max: int
    state_max: int
    steps: int
    requests: int


class SecondSeries:
    """
    The last hour of a rank, second by second; seconds in which nothing that can drift was measured are unknown.
    """

    __slots__ = ("_drift", "_requests", "_second", "_state", "_steps", "first", "last", "taken")

    def __init__(self) -> None:
        self._second = np.zeros(SECONDS_HELD, np.int64)
        self._drift = np.zeros(SECONDS_HELD, np.int64)
        self._state = np.zeros(SECONDS_HELD, np.int64)
        self._requests = np.zeros(SECONDS_HELD, np.int64)
        self._steps = np.zeros(SECONDS_HELD, np.int64)
        self.first = 0
        """The first second that was ever seen; 0 before that."""
        self.last = 0
        self.taken = 0
        """Samples up to this second were handed out."""

    def absorb(self, records: Records, unix: npt.NDArray[np.float64]) -> None:
        """
        Take in new records, with the wall-clock second at which each began.
        """
        measured = (records["lengths"] == Lengths.OUTPUT_TOKENS) & (records["phase"] >= Phase.STATE_UPDATED)
        records, unix = records[measured], unix[measured]
        if len(records) == 0:
            return
        seconds = unix.astype(np.int64)
        newest = max(self.last, int(seconds.max()))
        recent = seconds > newest - SECONDS_HELD
        records, seconds = records[recent], seconds[recent]
        slots = self._open(seconds)
        np.maximum.at(self._drift, slots, records["drift_max"].astype(np.int64))
        np.maximum.at(self._state, slots, records["state_max"].astype(np.int64))
        np.maximum.at(self._requests, slots, (records["cached"] + records["new"]).astype(np.int64))
        np.add.at(self._steps, slots, (records["phase"] == Phase.DONE).astype(np.int64))
        self.last = newest
        if self.first == 0:
            self.first = int(seconds.min())

    def note(self, second: int, drift: int, requests: int) -> None:
        """
        Take in a sample of device-side lengths, whose largest drift over so many requests this is.
        """
        if second <= 0 or second <= self.last - SECONDS_HELD:
            return
        slots = self._open(np.array([second], np.int64))
        np.maximum.at(self._drift, slots, drift)
        np.maximum.at(self._requests, slots, requests)
        self.last = max(self.last, second)
        self.first = self.first or second

    def _open(self, seconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """
        The slots of `seconds`, emptied where they held another second.
        """
        slots = seconds % SECONDS_HELD
        stale = self._second[slots] != seconds
        for array, empty in (
            (self._drift, np.iinfo(np.int64).min),
            (self._state, 0),
            (self._requests, 0),
            (self._steps, 0),
        ):
            array[slots[stale]] = empty
        self._second[slots] = seconds
        return slots

    def drift(self, seconds: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """
        Largest drift in each of `seconds`; NaN where nothing is known.
        """
        slots = seconds % SECONDS_HELD
        return np.where(self._second[slots] == seconds, self._drift[slots].astype(np.float64), np.nan)

    def take(self, until: int) -> Sequence[Sample]:
        """
        Samples that were not handed out yet, up to second `until`, not including it.
        """
        first = max(self.taken + 1, self.first, until - SECONDS_HELD + 1)
        if self.first == 0 or first >= until:
            return []
        seconds = np.arange(first, min(until, self.last + 1), dtype=np.int64)
        slots = seconds % SECONDS_HELD
        known = self._second[slots] == seconds
        self.taken = until - 1
        return [
            Sample(
                int(second),
                int(self._drift[slot]),
                int(self._state[slot]),
                int(self._steps[slot]),
                int(self._requests[slot]),
            )
            for second, slot in zip(seconds[known], slots[known], strict=True)
        ]
