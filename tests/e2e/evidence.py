"""
What the flight files themselves say: the ground that the server's findings are checked against.

Read straight from the files, with none of the server's code.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Guard, Phase
from rankscope_exporter.flight import FlightFile, list_flight_files


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """
    The records of one rank, and what turns their clock into wall-clock seconds.
    """

    pp_rank: int
    engine: str
    key: str
    pid: int
    records: npt.NDArray[np.void]
    faults: int
    acted_step: int
    unix_of_zero: float

    def at(self, step: int) -> np.void | None:
        """
        The record of a step; None if the ring does not hold it.
        """
        found = self.records[self.records["step"] == step]
        return found[0] if len(found) else None

    def unix(self, monotonic_ns: int) -> float:
        """
        Wall-clock second of a time in a record.
        """
        return self.unix_of_zero + monotonic_ns / 1e9


def read_ranks(directory: Path) -> list[RankEvidence]:
    """
    All ranks of a flight directory, by pipeline rank.
    """
    ranks = []
    for path in list_flight_files(directory):
        with FlightFile(path) as flight:
            identity = flight.identity()
            ranks.append(
                RankEvidence(
                    pp_rank=identity["pp_rank"],
                    engine=identity["engine"],
                    key=flight.key,
                    pid=flight.pid,
                    records=flight.records(),
                    faults=flight.faults(),
                    acted_step=flight.control().acted_step,
                    unix_of_zero=flight.created_unix - flight.created_monotonic_ns / 1e9,
                )
            )
    return sorted(ranks, key=lambda rank: rank.pp_rank)


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    Where the ranks of an engine differ, by step; None where they never do.
    """

    first_drift_step: int | None
    first_mask_disagreement_step: int | None
    first_guard_disagreement_step: int | None
    guard_disagreements: int
    drift_max: int
    drift_max_last_rank: int
    batches_equal: bool
    steps: int


def compare(ranks: list[RankEvidence]) -> Comparison:
    """
    Compare first and last rank at equal steps.
    """
    first, last = ranks[0].records, ranks[-1].records
    common = np.intersect1d(first["step"], last["step"])
    a, b = (records[np.isin(records["step"], common)] for records in (first, last))
    decided = (a["phase"] >= Phase.DECIDED) & (b["phase"] >= Phase.DECIDED)
    guards = decided & (a["guard"] != b["guard"]) & (a["guard"] != Guard.NONE) & (b["guard"] != Guard.NONE)
    masks = decided & (a["mask_known"] == 1) & (b["mask_known"] == 1) & (a["mask_hash"] != b["mask_hash"])
    drift = np.maximum(np.where(a["lengths"] > 0, a["drift_max"], 0), np.where(b["lengths"] > 0, b["drift_max"], 0))

    def step_of(where: npt.NDArray[np.bool_]) -> int | None:
        return int(common[where][0]) if where.any() else None

    return Comparison(
        first_drift_step=step_of(drift > 0),
        first_mask_disagreement_step=step_of(masks),
        first_guard_disagreement_step=step_of(guards),
        guard_disagreements=int(guards.sum()),
        drift_max=int(drift.max(initial=0)),
        drift_max_last_rank=int(b["drift_max"].max(initial=0)),
        batches_equal=bool((a["batch_hash"] == b["batch_hash"]).all()),
        steps=len(common),
    )
