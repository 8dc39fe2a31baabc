"""
What incidents cost: a look at an engine with and without one, and a frozen copy of the flight records of many ranks.

The copy is made while the event loop has other things to do. How long it holds the loop up is measured for what runs in
it, the copying of records; the packing runs in a thread.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import anyio
import figures
import numpy as np
import structlog

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from made_ranks import ManualClock, made_engine, made_rank, made_records, made_report

from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.incident import IncidentLife
from rankscope_server.domain.model import Finding, FindingKind, RankId, Severity
from rankscope_server.incidents.capture import BATCH, STEPS_KEPT, CaptureSubject, freeze_rank, make_capture
from rankscope_server.incidents.desk import IncidentDesk
from rankscope_server.incidents.perfetto import trace_json

LOOKS = 2000


def busy_records() -> np.ndarray:
    """
    Records that deflate has to work for: times, hashes and sums as they are in a run.
    """
    noise = np.random.default_rng(7)
    count = STEPS_KEPT + 100
    records = made_records(1, count)
    for name in ("begin_ns", "decide_ns", "end_ns"):
        records[name] += noise.integers(0, 3_000_000, count).astype(np.uint64)
    records["batch_hash"] = noise.integers(0, 1 << 63, count)
    records["mask_hash"] = np.where(noise.random(count) < 0.1, noise.integers(0, 1 << 63, count), 0)  # few are masked
    records["state_sum"] = records["scheduler_sum"] = noise.integers(1000, 5000, count)
    records["own_ns_total"] = np.cumsum(noise.integers(0, 30_000, count))
    for name in ("broadcasts_total", "posted_total"):
        records[name] = np.arange(count)
    return records


def make_ranks(count: int, records: np.ndarray) -> list:
    """
    Ranks of one engine that hold these records.
    """
    now = ManualClock().now()
    ranks = []
    for number in range(count):
        report = made_report(number // 128, tp_rank=number % 128, pp_size=8, tp_size=128)
        rank = made_rank(records[-1:], report, now=now)
        rank.history.absorb(records)
        ranks.append(rank)
    return ranks


def bench_copy(out: figures.Figures, count: int) -> None:
    """
    One copy of an engine of so many ranks.
    """
    figures.progress(f"copying {count} ranks")
    now = ManualClock().now()
    engine = made_engine(*make_ranks(count, busy_records()), now=now)
    held = []
    for first in range(0, min(count, 20 * BATCH), BATCH):
        began = time.perf_counter()
        kept = [freeze_rank(rank, now) for rank in engine.ranks[first : first + BATCH]]
        held.append((time.perf_counter() - began) * 1000)
        del kept
    subject = CaptureSubject(engine, "i-1", IncidentLife.OPEN, "", ())
    began, cpu = time.perf_counter(), time.process_time()
    made = anyio.run(make_capture, subject, now)
    detail = {"wall_seconds": round(time.perf_counter() - began, 2), "steps": STEPS_KEPT}
    out.report(f"cpu_seconds_{count}", round(time.process_time() - cpu, 2), "<= 20", **detail)
    out.report(f"loop_held_ms_{count}", round(statistics.median(held), 2), "<= 20", ranks_at_once=BATCH)
    out.report(f"megabytes_{count}", round(len(made.data) / 1e6, 1), "<= 60")
    if count <= 64:
        began = time.process_time()
        trace = trace_json(made.data)
        out.report(
            f"trace_seconds_{count}", round(time.process_time() - began, 2), megabytes=round(len(trace) / 1e6, 1)
        )


def bench_looks(out: figures.Figures) -> None:
    """
    The desk's part of a look at an engine of two ranks.
    """
    clock = ManualClock()
    now = clock.now()
    records = made_records(1, 100)
    engine = made_engine(*(made_rank(records, made_report(pp), now=now) for pp in (0, 1)), now=now)
    rank = RankId(0, 0, 0)
    drift = Finding(FindingKind.DRIFT, Severity.WARNING, "drift", 7, (rank,), now.unix)
    for name, goal, memory in (
        ("healthy", "<= 10", EngineMemory()),
        ("open", "<= 500", EngineMemory(findings={(FindingKind.DRIFT, 0): drift})),
    ):
        desk = IncidentDesk(clock, retention_seconds=1.0)
        desk.observe(engine, memory, now)
        began = time.process_time()
        for _ in range(LOOKS):
            desk.observe(engine, memory, now)
        out.report(f"look_us_{name}", round((time.process_time() - began) / LOOKS * 1e6, 1), goal)


def main() -> int:
    """
    All figures; the exit status is 1 if one misses its goal.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024, help="ranks of the engine that is copied")
    ranks = parser.parse_args().ranks
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    out = figures.Figures("capture")
    bench_looks(out)
    bench_copy(out, 2)
    bench_copy(out, ranks)
    return out.exit_code


if __name__ == "__main__":
    sys.exit(main())
