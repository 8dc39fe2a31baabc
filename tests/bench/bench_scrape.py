"""
CPU time of a scrape: files read, families collected, text rendered, in one process, over and over; and the memory that
each rank takes of the exporter process.

`--format openmetrics` is what Prometheus asks for; both formats cost about the same.
"""

import argparse
import contextlib
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import figures
import numpy as np

from rankscope_exporter.collectors.exposition import NodeFacts, Query, render
from rankscope_exporter.contract import Phase, RankIdentity
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_exporter.serve.node import Clock, Node

GOALS_MS = {8: "<= 10", 64: "<= 60"}
HOOKS = ("execute_model", "update_states", "guard", "broadcast", "receive", "sample_tokens")
ACCEPT = {"text": "", "openmetrics": "application/openmetrics-text;version=1.0.0"}


def step_values(number: int, step: int, now: int) -> dict[str, int]:
    """
    Fields of a step of a rank that drifts; the 200th is in flight.
    """
    begun = {"step": step, "batch_hash": step, "begin_ns": now, "new": 1, "cached": 31, "finished": 1, "scheduled_tokens": 128, "drafting": 31}  # fmt: skip
    state = {
        "state_sum": 9000 + number, "scheduler_sum": 8990, "drift_sum": 10, "trimmed_total": 5, "dropped_total": 3, "state_max": 700,
        "scheduler_max": 690, "drift_max": 3, "drifting": 4, "mitigation": 2, "lengths": 1, "queue_depth": 8, "queue_filled": 7,
    }  # fmt: skip
    decided = {
        "decide_ns": now, "mask_hash": 7, "broadcasts_total": step, "posted_total": step, "requests": 32, "masked": 2, "width": 4, "guard": 1,
        "role": 1, "mask_known": 1, "posted": 1,
    }  # fmt: skip
    if step == 200:
        return begun | state | decided | {"phase": Phase.DECIDED}
    return begun | state | decided | {"end_ns": now, "completed_total": step, "own_ns_total": step * 9000, "own_ns": 9000, "phase": Phase.DONE}  # fmt: skip


def make_rank(directory: Path, number: int) -> FlightWriter:
    """
    A rank in the middle of step 200 that has everything a scrape can show.
    """
    identity = RankIdentity(
        engine=f"engine-{number // 8:08x}", dp_rank=0, pp_rank=number % 8, tp_rank=0, pp_size=8, tp_size=1, dp_size=1, global_rank=number,
        host="node", pid=os.getpid(), model="some/model", vllm_version="0.27.1", runner="V1", runner_class="GPUModelRunner", device="cuda",
        async_scheduling=True, spec_method="eagle", spec_tokens=3, exporter_version="0.1.0",
        completes=True,
    )  # fmt: skip
    writer = FlightWriter(directory, f"rank-{number}", identity.model_dump(mode="json"), capacity=256)
    report = {
        "hooks": [{"hook": hook, "state": "on", "reason": ""} for hook in HOOKS],
        "mitigations": [{"mitigation": "trim", "state": 2, "reason": ""}],
    }
    writer.write_report(report)
    writer.words[layout.CONTROL_REQUEST] = layout.encode_control(1, 1, 100, desired=True)
    writer.words[layout.ACK_STEP], writer.words[layout.ACK_STATE] = 100, 2
    histograms = writer.memory[
        layout.HISTOGRAM_OFFSET : layout.HISTOGRAM_OFFSET + layout.HISTOGRAM_DTYPE.itemsize
    ].cast("Q")
    for bucket in range(2 * layout.BUCKETS + 2):
        histograms[bucket] = 100 + bucket
    writer.live[layout.LIVE_SAMPLES] = 6
    for word in range(layout.OWN_BUCKETS + 1):
        writer.own[word] = 10 + word
    layout.DEVICE.pack_into(writer.device, 0, 2, 64, 3, 192, time.monotonic_ns(), 9000, 8990, 31, 0, 0, 0)
    for step in range(1, 201):
        now = time.monotonic_ns()
        record = np.zeros((), layout.STEP_DTYPE)
        for name, value in step_values(number, step, now).items():
            record[name] = value
        offset = layout.RING_OFFSET + step * layout.STEP_DTYPE.itemsize
        writer.memory[offset : offset + layout.STEP_DTYPE.itemsize] = record.tobytes()
        writer.live[layout.LIVE_STEP] = step
    return writer


@contextlib.contextmanager
def made_ranks(count: int) -> Iterator[Path]:
    """
    A directory with the flight files of so many ranks.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        for number in range(count):
            make_rank(Path(name), number)
        yield Path(name)


def scrape(node: Node, accept: str) -> bytes:
    """
    The body of one scrape.
    """
    facts = NodeFacts(node.name, str(node.directory), control=True, unreadable=0)
    return render(node.read().ranks, facts, Query(), accept)[0]


def measure(ranks: int, rounds: int, accept: str) -> tuple[list[float], int]:
    """
    CPU milliseconds of each scrape of a node with `ranks` ranks, and the samples in one.
    """
    with made_ranks(ranks) as directory:
        node = Node(directory, Clock())
        times = []
        body = b""
        for _ in range(rounds + 1):
            begin = time.process_time()
            body = scrape(node, accept)
            times.append((time.process_time() - begin) * 1000)
        node.close()
    return times[1:], sum(1 for line in body.splitlines() if not line.startswith(b"#"))


def private_bytes(directory: Path, rounds: int, accept: str) -> int:
    """
    Memory that this process has for itself after so many scrapes and answers of step records.
    """
    node = Node(directory, Clock())
    for _ in range(rounds):
        scrape(node, accept)
        node.steps(None)
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Private_"))


def measure_memory(ranks: int, rounds: int, accept: str) -> int:
    """
    The same, in a process of its own.
    """
    with (
        made_ranks(ranks) as directory,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process,
    ):
        return process.submit(private_bytes, directory, rounds, accept).result()


def main() -> int:
    """
    Measure, print figures; 1 if a goal was missed.
    """
    parser = argparse.ArgumentParser(description="CPU time of a scrape.")
    parser.add_argument("--rounds", type=int, default=60, help="scrapes per size (60)")
    parser.add_argument("--format", choices=sorted(ACCEPT), default="openmetrics")
    options = parser.parse_args()
    out = figures.Figures("scrape")
    for ranks, goal in GOALS_MS.items():
        figures.progress(f"scrape: {ranks} ranks, {options.rounds} rounds")
        times, samples = measure(ranks, options.rounds, ACCEPT[options.format])
        out.report(
            f"cpu_ms_{ranks}", round(statistics.median(times), 2), goal,
            samples=samples, format=options.format, min_ms=round(min(times), 2), p95_ms=round(statistics.quantiles(times, n=20)[-1], 2),
        )  # fmt: skip
    figures.progress("scrape: memory")
    few, many = (measure_memory(ranks, options.rounds, ACCEPT[options.format]) for ranks in GOALS_MS)
    least, most = GOALS_MS
    out.report(
        "bytes_per_rank", (many - few) // (most - least), "<= 262144", **{f"bytes_{least}": few, f"bytes_{most}": many}
    )
    return out.exit_code


if __name__ == "__main__":
    sys.exit(main())
