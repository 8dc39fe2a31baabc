"""
Saved flight files of ranks that never ran: made of records and reports, on nodes with clocks of their own.
"""

from pathlib import Path
from typing import Any

import numpy as np
from made_ranks import START_UNIX, made_record, made_records, made_report

from rankscope_exporter.contract import Guard, Phase, RankReport
from rankscope_exporter.flight import compose_flight

CREATED_NS = 900_000_000
"""A node's monotonic clock when its files were made; `made_records` begin at 1 s."""

LAST = 40
"""The step at which `write_wedge` hangs."""
DRIFT = {"drift_max": 4, "drift_sum": 8, "drifting": 2, "state_sum": 808}


def write_flight(
    directory: Path,
    records: np.ndarray,
    report: RankReport | None = None,
    *,
    name: str | None = None,
    created_unix: float = START_UNIX,
    **values: Any,
) -> Path:
    """
    A flight file with these records; `values` are further arguments of `compose_flight`.
    """
    report = report or made_report()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (name or f"{report.key}-{report.identity.pid}.flight")
    told = {
        "hooks": [hook.model_dump(mode="json") for hook in report.hooks],
        "mitigations": [mitigation.model_dump(mode="json") for mitigation in report.mitigations],
        "failure": None if report.failure is None else report.failure.model_dump(mode="json"),
    }
    clocks = {"created_unix": created_unix, "created_monotonic_ns": CREATED_NS}
    content = compose_flight(report.identity.model_dump(mode="json"), told, records, **{**clocks, "pid": report.identity.pid, **values})  # fmt: skip
    path.write_bytes(content)
    return path


def node_unix(node_ns: int, created_unix: float = START_UNIX) -> float:
    """
    Wall-clock second of a time in a record.
    """
    return created_unix + (node_ns - CREATED_NS) / 1e9


def write_wedge(directory: Path) -> list[Path]:
    """
    Two ranks that drift from step 20 on, mask differently from step 30 on, and part at step 40: one skips, the other hangs.
    """

    def first(step: int) -> dict[str, Any]:
        masked = {} if step < 30 else {"masked": 3, "mask_hash": 3}
        skips = {"masked": 8, "mask_hash": 8, "guard": Guard.SKIP} if step == LAST else {}
        return (DRIFT if step >= 20 else {}) | masked | skips

    ahead = np.concatenate([made_records(1, LAST, first), made_record(LAST + 1, Phase.STATE_UPDATED, **DRIFT)])
    behind = np.concatenate([made_records(1, LAST - 1), made_record(LAST, Phase.DECIDED, role=1)])
    rows = [(LAST, 20, 130, 126, 4, -1, 1, 5, b"req-a"), (LAST, 24, 130, 126, 4, 2, 0, 5, b"req-b")]
    return [
        write_flight(directory, ahead, table=rows, drifting=2),
        write_flight(directory, behind, made_report(1)),
    ]
