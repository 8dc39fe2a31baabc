"""
A scrape: what it serves, what it leaves out, what it survives.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.testclient import TestClient

from rankscope_exporter.collectors.exposition import SUBJECTS, NodeFacts, Query, build_registry, render
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.collectors.text import encode
from rankscope_exporter.contract import ControlOutcome, Guard, MitigationState, Phase, Role
from rankscope_exporter.flight import layout
from rankscope_exporter.serve.node import Clock, Node

Make = Callable[..., Any]
FACTS = NodeFacts(node="node-a", flight_dir="/flight", control=True, unreadable=1)
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.1"


@pytest.fixture
def scrape(flight_dir: Path) -> Callable[..., CollectorRegistry]:
    """A registry for one scrape; ask it by `get_sample_value`."""

    def build(query: Query | None = None, **options: Any) -> CollectorRegistry:
        return build_registry(Node(flight_dir, Clock()).read().ranks, FACTS, query or Query(), **options)

    return build


def labels(pp_rank: int = 0, **more: str) -> dict[str, str]:
    return {"engine": "e1", "dp_rank": "0", "pp_rank": str(pp_rank), "tp_rank": "0", **more}


def names(registry: CollectorRegistry) -> set[str]:
    return {sample.name for family in registry.collect() for sample in family.samples}


def test_values(scrape: Make, rank_file: Make) -> None:
    """The samples of a rank say what its records say."""
    rank = rank_file(0)
    rank.steps(4)
    rank.step(
        5, state_sum=50, scheduler_sum=40, state_max=30, scheduler_max=22, drift_sum=10, drift_max=8, drifting=2, trimmed_total=7,
        new=1, cached=5, finished=2, scheduled_tokens=33, drafting=4, requests=6, masked=3, guard=Guard.SKIP, role=Role.RECEIVER,
        broadcasts_total=4, skips_total=1, posted_total=4, completed_total=3, width=4, own_ns=2000, own_ns_total=9000,
    )  # fmt: skip
    rank.writer.live[layout.LIVE_FAULTS] = 2

    value = scrape().get_sample_value

    expected = {
        "steps_total": 5, "step_phase": 4, "step_in_flight": 0, "step_request_state_length_sum_tokens": 50,
        "step_request_state_length_max_tokens": 30, "step_scheduler_length_sum_tokens": 40, "step_scheduler_length_max_tokens": 22,
        "drift_sum_tokens": 10, "drift_max_tokens": 8, "drifting_requests": 2, "trimmed_tokens_total": 7, "scheduled_tokens": 33,
        "speculative_requests": 4, "batch_requests": 6, "masked_requests": 3, "mask_known": 1, "guard_broadcasts_total": 4, "guard_skips_total": 1,
        "collectives_posted_total": 4, "collectives_completed_total": 3, "collective_width_columns": 4, "own_measured_steps_total": 0,
        "own_seconds_total": 9e-6, "faults_total": 2,
    }  # fmt: skip
    assert {name: value(f"rankscope_{name}", labels()) for name in expected} == expected
    assert [value("rankscope_scheduled_requests", labels(kind=kind)) for kind in ("new", "cached", "finished")] == [
        1,
        5,
        2,
    ]
    assert [value("rankscope_guard_decision", labels(decision=name)) for name in ("none", "broadcast", "skip")] == [
        0,
        0,
        1,
    ]
    assert value("rankscope_collective_role", labels(role="receiver")) == 1


def test_negative_drift(scrape: Make, rank_file: Make) -> None:
    """Drift below zero is served as it is."""
    rank_file(0).step(1, drift_sum=-3, drift_max=-1)

    assert scrape().get_sample_value("rankscope_drift_sum_tokens", labels()) == -3


def test_before_the_first_step(scrape: Make, rank_file: Make) -> None:
    """A rank that took no step yet has identity, life and a count of 0 steps, and nothing that would be invented."""
    rank_file(0)

    rank_names = {name.removeprefix("rankscope_") for name in names(scrape(subjects={"rank": SUBJECTS["rank"]}))}

    assert rank_names == {"rank_info", "rank_life", "rank_start_timestamp_seconds", "steps_total"} | {
        "exporter_info", "flight_files", "control_enabled", "collector_success", "collector_duration_seconds",
    }  # fmt: skip


UNKNOWN = [
    ({"lengths": 0}, {"rankscope_drift_max_tokens", "rankscope_drifting_requests", "rankscope_trimmed_tokens_total"}),
    ({"mask_known": 0}, {"rankscope_masked_requests"}),
    ({"width": 0}, {"rankscope_collective_width_columns"}),
    ({"completed_total": 0}, {"rankscope_collectives_completed_total"}),
    (
        {"guard": Guard.NONE, "mask_known": 0},
        {"rankscope_batch_requests", "rankscope_masked_requests", "rankscope_mask_known"},
    ),
    ({"role": Role.NONE}, {"rankscope_collective_role"}),
]


@pytest.mark.parametrize(("fields", "absent"), UNKNOWN)
def test_unknown_is_left_out(scrape: Make, rank_file: Make, fields: dict[str, int], absent: set[str]) -> None:
    """What a record does not know is not served, and everything else is."""
    known, unknown = rank_file(0), rank_file(1)
    known.steps(2)
    unknown.step(1)
    unknown.step(2, **fields)
    served = {
        pp: {
            s.name
            for f in scrape(Query({"pp_rank": frozenset({pp})})).collect()
            for s in f.samples
            if s.labels.get("pp_rank") == pp
        }
        for pp in ("0", "1")
    }

    assert served["0"] - served["1"] >= absent
    assert "rankscope_steps_total" in served["1"]


def test_counters_do_not_go_backwards(scrape: Make, rank_file: Make) -> None:
    """In no phase of a step does a counter show less than before."""
    rank = rank_file(0)
    rank.steps(3)
    series: dict[str, list[float]] = {}
    for step in (4, 5):
        for phase in (Phase.SCHEDULED, Phase.STATE_UPDATED, Phase.DECIDED, Phase.DONE):
            rank.step(step, phase)
            for family in scrape().collect():
                if family.type == "counter":
                    for sample in family.samples:
                        series.setdefault(sample.name, []).append(sample.value)

    assert {name for name, values in series.items() if values != sorted(values)} == set()
    assert {len(values) for values in series.values()} == {8}


def test_step_in_flight(scrape: Make, rank_file: Make, flight_dir: Path) -> None:
    """A step in flight has an age; a rank that is gone in the middle of one keeps it."""
    rank = rank_file(0)
    rank.step(1, Phase.DECIDED)
    rank.gone()

    value = scrape().get_sample_value

    assert value("rankscope_step_in_flight", labels()) == 1
    assert value("rankscope_step_in_flight_seconds", labels()) >= 0
    assert [value("rankscope_rank_life", labels(life=life)) for life in ("running", "stopped", "gone")] == [0, 0, 1]


def test_mitigation_and_control(scrape: Make, rank_file: Make) -> None:
    """State, generations, the wish and the outcome are told apart."""
    rank = rank_file(0)
    rank.mitigation(MitigationState.APPLIED)
    words = rank.writer.words
    words[layout.CONTROL_REQUEST] = layout.encode_control(1, 6, 90, desired=False)
    words[layout.ACK_OBSERVED] = words[layout.ACK_WORD] = layout.encode_control(1, 5, 70, desired=True)
    words[layout.ACK_STEP], words[layout.ACK_OUTCOME] = 71, ControlOutcome.APPLIED_LATE

    value = scrape().get_sample_value

    assert value("rankscope_mitigation_state", labels(mitigation="trim", state="applied")) == 1
    assert value("rankscope_mitigation_state", labels(mitigation="trim", state="available")) == 0
    got = {name: value(f"rankscope_control_{name}", labels()) for name in
           ("requested_generation", "observed_generation", "desired", "effective_step", "acted_step")}  # fmt: skip
    assert got == {
        "requested_generation": 6,
        "observed_generation": 5,
        "desired": 0,
        "effective_step": 90,
        "acted_step": 71,
    }
    assert value("rankscope_control_outcome", labels(outcome="applied late")) == 1


def test_hooks(scrape: Make, rank_file: Make) -> None:
    """A hook that is not on says so, with the reason."""
    hooks = [{"hook": "a", "state": "on", "reason": ""}, {"hook": "b", "state": "off", "reason": 'no such "method"\n'}]
    rank_file(0).mitigation(MitigationState.AVAILABLE, hooks=hooks)

    value = scrape().get_sample_value

    assert value("rankscope_hook_on", labels(hook="a", state="on", reason="")) == 1
    assert value("rankscope_hook_on", labels(hook="b", state="off", reason='no such "method"\n')) == 0


def test_histogram(scrape: Make, rank_file: Make) -> None:
    """Buckets are cumulative, at bounds that the flight file has, and agree with count and sum."""
    rank = rank_file(0)
    words = rank.writer.memory[
        layout.HISTOGRAM_OFFSET : layout.HISTOGRAM_OFFSET + layout.HISTOGRAM_DTYPE.itemsize
    ].cast("Q")
    for index, length in ((0, 0), (1, 1), (3, 4), (4, 5), (19, 1 << 20)):
        words[index] += 1
        words[2 * layout.BUCKETS] += length
    rank.writer.live[layout.LIVE_SAMPLES] = 1

    value = scrape().get_sample_value
    name = "rankscope_request_state_length_tokens"

    bounds = ["0.0", "4.0", "16.0", "64.0", "256.0", "1024.0", "4096.0", "16384.0", "65536.0", "+Inf"]
    assert [value(f"{name}_bucket", labels(le=bound)) for bound in bounds] == [1, 3, 4, 4, 4, 4, 4, 4, 4, 5]
    assert (value(f"{name}_count", labels()), value(f"{name}_sum", labels())) == (5, (1 << 20) + 10)


def test_histogram_before_the_first_sample(scrape: Make, rank_file: Make) -> None:
    """Without a sample there is no histogram."""
    rank_file(0).steps(1)

    assert "rankscope_request_state_length_tokens_count" not in names(scrape())


def test_failing_collector(scrape: Make, rank_file: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A collector that fails costs its own metrics only, and says so."""
    rank_file(0).steps(1)

    def fails(ranks: Sequence[RankReading]) -> list[Metric]:
        raise RuntimeError("on purpose")

    value = scrape(subjects={**SUBJECTS, "drift": fails}).get_sample_value

    assert value("rankscope_collector_success", {"collector": "drift"}) == 0
    assert value("rankscope_drift_max_tokens", labels()) is None
    assert value("rankscope_collector_success", {"collector": "guard"}) == 1
    assert value("rankscope_guard_skips_total", labels()) == 0
    assert "on purpose" in caplog.text


def test_filter_ranks(client: TestClient, rank_file: Make) -> None:
    """A query chooses ranks; several values of one label are any of them."""
    for engine in ("e1", "e2"):
        for pp_rank in range(3):
            rank_file(pp_rank, engine=engine)

    def served(query: str) -> set[tuple[str, str]]:
        families = parse_text(client.get(f"/metrics?{query}").text)
        return {(s.labels["engine"], s.labels["pp_rank"]) for f in families for s in f.samples if "engine" in s.labels}

    assert len(served("")) == 6
    assert served("engine=e2&pp_rank=1") == {("e2", "1")}
    assert served("engine=e1&pp_rank=0&pp_rank=2") == {("e1", "0"), ("e1", "2")}
    assert served("engine=e1&pp_rank=01") == {("e1", "1")}
    assert served("engine=none") == set()


def test_filter_metrics(client: TestClient, rank_file: Make) -> None:
    """`name[]` chooses metrics; part of a histogram means the histogram."""
    rank = rank_file(0)
    rank.steps(1)
    rank.writer.live[layout.LIVE_SAMPLES] = 1

    text = client.get(
        "/metrics", params={"name[]": ["rankscope_steps_total", "rankscope_scheduler_length_tokens_bucket"]}
    ).text

    assert {family.name for family in parse_text(text)} == {"rankscope_steps", "rankscope_scheduler_length_tokens"}


@pytest.mark.parametrize(
    ("query", "said"),
    [("pp_rank=x", "not a rank number"), ("name[]=up", "docs/metrics.md"), ("pp=0", "known here: engine")],
)
def test_bad_query(client: TestClient, query: str, said: str) -> None:
    """A query that means nothing is refused with what is known."""
    answer = client.get(f"/metrics?{query}")

    assert (answer.status_code, said in answer.text) == (400, True)


def test_no_rank(client: TestClient) -> None:
    """A node without ranks is a valid scrape that says so."""
    families = {family.name: family for family in parse_text(client.get("/metrics").text)}

    assert "rankscope_steps" not in families
    assert {s.labels["state"]: s.value for s in families["rankscope_flight_files"].samples} == {
        "readable": 0,
        "unreadable": 0,
        "superseded": 0,
    }


def test_superseded(scrape: Make, rank_file: Make) -> None:
    """Two files of one rank make no duplicate series: the live one is served, the other counted."""
    rank_file(0, key="left").gone()
    rank_file(0)

    registry = scrape()

    assert registry.get_sample_value("rankscope_flight_files", {"state": "superseded"}) == 1
    assert sum(s.name == "rankscope_steps_total" for f in registry.collect() for s in f.samples) == 1


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [("", "text/plain; version=0.0.4"), (OPENMETRICS, "application/openmetrics-text; version=1.0.0")],
)
def test_formats(client: TestClient, rank_file: Make, accept: str, media_type: str) -> None:
    """Both text formats are served as asked for, and the official parsers take them."""
    rank = rank_file(0)
    rank.steps(2)
    rank.writer.live[layout.LIVE_SAMPLES] = 1

    answer = client.get("/metrics", headers={"accept": accept})

    assert answer.headers["content-type"].startswith(media_type)
    parse = parse_openmetrics if accept else parse_text
    assert len(list(parse(answer.text))) > 30


def test_same_bytes_as_prometheus_client(flight_dir: Path, rank_file: Make) -> None:
    """Our encoder gives the same bytes as the official one, in both formats."""
    rank = rank_file(0, model='a "model"\\with\noddities')
    rank.steps(3)
    rank.writer.live[layout.LIVE_SAMPLES] = 10_000_000
    rank_file(1).step(1, Phase.DECIDED, drift_sum=-5)
    readings = Node(flight_dir, Clock(monotonic_ns=lambda: 1)).read().ranks
    subjects = [subject(readings) for subject in SUBJECTS.values()]
    registry = CollectorRegistry()
    registry.register(
        type("Fixed", (), {"collect": lambda self: [family for families in subjects for family in families]})()
    )

    assert encode(registry.collect(), openmetrics=False) == generate_latest(registry)
    assert encode(registry.collect(), openmetrics=True) == generate_openmetrics(registry)


@settings(max_examples=60, deadline=None)
@given(st.floats() | st.integers(-(2**63), 2**64), st.text(), st.sampled_from(["counter", "gauge"]), st.text())
def test_any_value_and_label(value: float, label: str, kind: str, documentation: str) -> None:
    """So it does for any value, label and documentation."""
    family = Metric("some_seconds", documentation, kind, "seconds")
    name = "some_seconds_total" if kind == "counter" else "some_seconds"
    family.add_sample(name, {"b": label, "a": "x"}, value)
    family.add_sample(name, {}, value)
    registry = CollectorRegistry()
    registry.register(type("Fixed", (), {"collect": lambda self: [family]})())
    try:
        expected = generate_latest(registry), generate_openmetrics(registry)
    except UnicodeEncodeError:
        return

    assert (encode([family], openmetrics=False), encode([family], openmetrics=True)) == expected


def test_dots_are_not_promised() -> None:
    """A scraper that asks for another escaping of names gets the names as they are, and is told so."""
    _, media_type = render([], FACTS, Query(), "application/openmetrics-text;version=1.0.0;escaping=dots")

    assert "escaping=dots" not in media_type
