"""
The table of metrics, its documentation, and that a scrape is what the table says.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rankscope_exporter.collectors.exposition import SUBJECTS, CollectorFailures, NodeFacts, Query, build_registry
from rankscope_exporter.collectors.nccl import Communicator, NcclRank, NcclView, SeenCommunicator
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.collectors.text import encode
from rankscope_exporter.contract import Guard, MitigationState, Phase, Role
from rankscope_exporter.contract.metrics import METRICS, RANK_LABELS, markdown
from rankscope_exporter.flight import layout
from rankscope_exporter.serve.node import Clock, Node

Make = Callable[..., Any]
ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "scrape.txt"
FACTS = NodeFacts(node="node-a", flight_dir="/dev/shm/rankscope", control=True, unreadable=0)
IN_TROUBLE = Communicator(
    "a" * 16, 2, "running", (NcclRank(0, "10.1.2.3", 4241, 0, "running", {"Broadcast": 71}, (("async", "system error"),)),), 1,
    error=True, ranges={"Broadcast": (71, 71)}, fingerprint=1,
)  # fmt: skip
NCCL = (
    NcclView(
        "localhost:28028", True, 1.5, "2.28.9", "json", {"timeout": 1}, {("running", "error"): 1},
        (SeenCommunicator(IN_TROUBLE, "error", 1.5, 30.0),),
    ),
)  # fmt: skip
BY_NAME = {name: spec for spec in METRICS for name in spec.sample_names}


@pytest.fixture
def readings(flight_dir: Path, rank_file: Make, still_clock: Clock) -> list[RankReading]:
    """
    Two ranks that parted: one waits in a collective that the other skipped, which has a hook that failed, a step behind it
    that an error ended, a receive queue, and device-side lengths.
    """
    sender, receiver = rank_file(1, pid=4242), rank_file(0, pid=4241)
    ns = still_clock.monotonic_ns()
    times = {"begin_ns": ns - 3_000_000_000, "decide_ns": ns - 2_990_000_000, "end_ns": ns - 2_980_000_000}
    in_flight = times | {"begin_ns": ns - 2_500_000_000, "decide_ns": ns - 2_400_000_000}
    drift = {
        "state_sum": 52,
        "state_max": 28,
        "scheduler_sum": 40,
        "scheduler_max": 22,
        "drift_sum": 12,
        "drift_max": 6,
        "drifting": 2,
    }
    sender.step(71, **times)
    sender.step(72, Phase.DECIDED, **{name: in_flight[name] for name in ("begin_ns", "decide_ns")})
    receiver.step(71, role=Role.RECEIVER, masked=1, **times, **drift)
    receiver.step(
        72, role=Role.RECEIVER, guard=Guard.SKIP, masked=2, broadcasts_total=71, posted_total=71, skips_total=1, completed_total=71, width=0,
        queue_depth=2, queue_filled=1, dropped_total=3, **in_flight, **drift,
    )  # fmt: skip
    hooks = [
        {"hook": "update_states", "state": "on", "reason": ""},
        {"hook": "sample_tokens", "state": "absent", "reason": "no such method", "faults": {"KeyError": 2}},
    ]
    receiver.fail(70, Phase.DECIDED, method="sample_tokens", kind="AssertionError")
    receiver.writer.live[layout.LIVE_STEP] = 72
    receiver.own_time(b3=3, b6=1)
    receiver.device(
        samples=1, step=64, taken_ns=ns - 3_100_000_000, rows=2, total_sum=52, computed_sum=50, excess_rows=1, total_excess=4, computed_excess=4
    )  # fmt: skip
    receiver.mitigation(MitigationState.APPLIED, hooks=hooks)
    words = receiver.writer.words
    words[layout.CONTROL_REQUEST] = words[layout.ACK_OBSERVED] = words[layout.ACK_WORD] = layout.encode_control(
        1, 2, 70, desired=True
    )
    words[layout.ACK_STEP], words[layout.ACK_OUTCOME] = 70, 2
    receiver.writer.memory[layout.HISTOGRAM_OFFSET : layout.HISTOGRAM_OFFSET + 8 * 6].cast("Q")[5] = 4
    receiver.writer.live[layout.LIVE_SAMPLES] = 2
    for rank in (sender, receiver):
        head = list(layout.HEADER.unpack_from(rank.writer.memory, 0))
        head[10] = 1_779_999_900 * 10**9
        layout.HEADER.pack_into(rank.writer.memory, 0, *head)
    return Node(flight_dir, still_clock).read().ranks


def registry(readings: list[RankReading], facts: NodeFacts) -> CollectorRegistry:
    """A scrape by a process in which a collector once failed."""
    failures = CollectorFailures()
    failures.counts["nccl", "KeyError"] = 1
    return build_registry(readings, facts, Query(), failures=failures)


def text(readings: list[RankReading]) -> str:
    raw = encode(registry(readings, FACTS).collect(), openmetrics=False).decode()
    return re.sub(r"(rankscope_collector_duration_seconds\{.*\}) .*", r"\1 0.0", raw)


def test_golden(readings: list[RankReading], update_goldens: bool) -> None:
    """A whole scrape is as it was; `--update-goldens` accepts a change."""
    got = text(readings)
    if update_goldens:
        GOLDEN.write_text(got)

    assert got == GOLDEN.read_text()


def test_documentation() -> None:
    """`docs/metrics.md` is what `rankscope-exporter metrics-doc` prints."""
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown(), (
        "run `rankscope-exporter metrics-doc > docs/metrics.md`"
    )


def test_every_sample_is_in_the_table(readings: list[RankReading]) -> None:
    """Name, type, help and labels of each sample are those of the table."""
    for family in registry(readings, replace(FACTS, nccl=NCCL)).collect():
        for sample in family.samples:
            spec = BY_NAME[sample.name]

            assert (family.type, family.documentation) == (spec.kind, spec.help)
            assert set(sample.labels) - {"le"} == set(spec.all_labels), sample.name


def test_every_metric_is_served(readings: list[RankReading]) -> None:
    """Each row of the table is served by the collector that it names."""
    families = registry(readings, replace(FACTS, nccl=NCCL)).collect()
    served = {sample.name for family in families for sample in family.samples}

    assert set(BY_NAME) == served
    assert {spec.subject for spec in METRICS} - {"nccl", "node", "collector"} == set(SUBJECTS)


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_prometheus_practice(spec: Any) -> None:
    """Prefix, base units in the name, `_total` for counters and for nothing else, a sentence of help, plain label names."""
    assert spec.name.startswith("rankscope_")
    assert (spec.kind == "counter") == spec.name.endswith("_total")
    assert not spec.unit or spec.unit in spec.name
    assert not re.search(r"milli|micro|_ms|_ns|_us\b|percent", spec.name)
    assert spec.help.endswith(".")
    assert all(re.fullmatch("[a-z_]+", label) for label in spec.all_labels)
    assert not set(spec.labels) & set(RANK_LABELS)


def test_names_are_unique() -> None:
    """No name is taken twice."""
    assert len({spec.name for spec in METRICS}) == len(METRICS)
