"""
What a batch did, turn by turn: how many of its requests a rank still counts in, and how that changes.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Phase
from rankscope_server.domain.history import Records

Ints = npt.NDArray[np.int64]


CLOSE_FIT = 0.5
"""
Requests by which a step may differ on average from what the one before it leads to, if every step has the same batch.
"""


@dataclass(frozen=True, slots=True)
class Turns:
    """
    The turns of one batch on one rank, oldest first; all arrays are of one length.
    """

    step: Ints
    begin_ns: Ints
    unmasked: Ints
    """Requests whose sampled token the rank keeps."""
    masked: Ints
    """Requests whose sampled token the rank discards and the last rank keeps."""
    arrived: Ints
    """Requests that came into the batch in this turn."""
    finished: Ints
    drafting: Ints
    drifting: Ints
    drift_sum: Ints
    followed: npt.NDArray[np.bool_]
    """Whether the turn before is there, and no request left the batch in between."""

    def __len__(self) -> int:
        return len(self.step)

    def since(self, index: int) -> "Turns":
        """
        The turns from an index on.
        """
        return Turns(*(getattr(self, name)[index:] for name in self.__slots__))

    @property
    def rejected(self) -> tuple[Ints, Ints, Ints]:
        """
        Draft tokens that were rejected, by turn, and of how many unmasked and masked requests that draft.

        Drift shows what was rejected two turns before, as the scheduler plans one turn ahead; what a masked request
        misses takes one token off.
        """
        clean = np.flatnonzero(self.followed[2:] & self.followed[1:-1]) + 2
        rejected = self.drift_sum[clean] - self.drift_sum[clean - 1] + self.masked[clean - 1]
        masked = np.minimum(self.masked[clean - 2], self.drafting[clean - 2])
        return rejected, self.drafting[clean - 2] - masked, masked


def beside(records: Records, others: Records) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """
    For each of `records`, where `others` (not empty, oldest first) have the same step, and whether they do.
    """
    at = np.minimum(np.searchsorted(others["step"], records["step"]), len(others) - 1)
    return at, np.asarray(others["step"][at] == records["step"])


def extract_turns(records: Records, last_rank: Records, most: int) -> Turns:
    """
    The turns of the batch that is worst off, of at most `most` batches that take turns.

    `records` are those of the rank that is looked at, `last_rank` those of the last pipeline rank, both oldest first.
    Steps that are not decided yet, or whose masks are not known, are left out.
    """
    decided = records[(records["phase"] >= Phase.DECIDED) & (records["mask_known"] == 1)]
    period = batches_in_turn(decided, most)
    held = _masked_on(last_rank, decided)
    if period == 1:
        return _turns(decided, held, period)
    places = [decided["step"] % period == place for place in range(period)]
    batches = [_turns(decided[mine], held[mine], period) for mine in places]
    return min(batches, key=lambda turns: int(turns.unmasked[-1]) if len(turns) else 1 << 30)


def batches_in_turn(records: Records, most: int) -> int:
    """
    How many batches take turns, from 1 to `most`: the requests of a step were there so many steps before.
    """
    if len(records) < 8:
        return 1
    cached, requests, finished = (records[name].astype(np.int64) for name in ("cached", "requests", "finished"))
    sums = np.concatenate([[0], np.cumsum(finished)])
    misfits: list[float] = []
    for period in range(1, max(1, most) + 1):
        left = sums[period + 1 :] - sums[1:-period]
        misfits.append(float(np.abs(requests[:-period] - cached[period:] - left / period).mean()))
        if misfits[0] <= CLOSE_FIT:
            return 1
    best = int(np.argmin(misfits))
    # One batch that is steady fits at any distance: more than one is believed only if they are told apart.
    return best + 1 if misfits[best] < 0.5 * misfits[0] else 1


def _masked_on(last_rank: Records, decided: Records) -> Ints:
    """
    Requests that the last rank masks too at each step, as it should: they are reading their prompt.
    """
    if len(last_rank) == 0:
        return np.zeros(len(decided), np.int64)
    at, there = beside(decided, last_rank)
    known = there & (last_rank["phase"][at] >= Phase.DECIDED) & (last_rank["mask_known"][at] == 1)
    return np.where(known, last_rank["masked"][at], 0).astype(np.int64)


def _turns(records: Records, held: Ints, period: int) -> Turns:
    step, requests, masked, cached, finished = (
        records[name].astype(np.int64) for name in ("step", "requests", "masked", "cached", "finished")
    )
    followed = np.zeros(len(records), bool)
    followed[1:] = (np.diff(step) == period) & (cached[1:] == requests[:-1]) & (finished[1:] == 0)
    return Turns(
        step=step,
        begin_ns=records["begin_ns"].astype(np.int64),
        unmasked=requests - masked,
        masked=np.maximum(masked - held, 0),
        arrived=records["new"].astype(np.int64),
        finished=finished,
        drafting=records["drafting"].astype(np.int64),
        drifting=records["drifting"].astype(np.int64),
        drift_sum=records["drift_sum"].astype(np.int64),
        followed=followed,
    )
