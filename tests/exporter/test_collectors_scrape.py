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

from rankscope_exporter.collectors.blind import REASONS
from rankscope_exporter.collectors.exposition import (
    SUBJECTS,
    CollectorFailures,
    NodeFacts,
    Query,
    build_registry,
    render,
)
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
        broadcasts_total=4, skips_total=1, posted_total=4, completed_total=3, width=4, queue_depth=3,
        queue_filled=2, dropped_total=9, posted=3,
    )  # fmt: skip
    rank.writer.live[layout.LIVE_FAULTS] = 2

    value = scrape().get_sample_value

    expected = {
        "steps_total": 5, "step_phase": 4, "step_in_flight": 0, "step_request_state_length_sum_tokens": 50,
        "step_request_state_length_max_tokens": 30, "step_scheduler_length_sum_tokens": 40, "step_scheduler_length_max_tokens": 22,
        "drift_sum_tokens": 10, "drift_max_tokens": 8, "drifting_requests": 2, "trimmed_tokens_total": 7, "scheduled_tokens": 33,
        "speculative_requests": 4, "batch_requests": 6, "masked_requests": 3, "mask_known": 1, "guard_broadcasts_total": 4, "guard_skips_total": 1,
        "collectives_posted_total": 4, "collectives_completed_total": 3, "collective_width_columns": 4, "step_posted_collectives": 3,
        "receive_queue_slots": 3, "receive_queue_filled_slots": 2, "dropped_rows_total": 9, "faults_total": 2,
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
    (
        {"queue_depth": 0},
        {"rankscope_receive_queue_slots", "rankscope_receive_queue_filled_slots", "rankscope_dropped_rows_total"},
    ),
    (
        {"guard": Guard.NONE, "mask_known": 0},
        {
            "rankscope_batch_requests",
            "rankscope_masked_requests",
            "rankscope_mask_known",
            "rankscope_step_posted_collectives",
        },
    ),
    ({"role": Role.NONE}, {"rankscope_collective_role"}),
]


@pytest.mark.parametrize(("fields", "absent"), UNKNOWN)
def test_unknown_is_left_out(scrape: Make, rank_file: Make, fields: dict[str, int], absent: set[str]) -> None:
    """What a record does not know is not served, and everything else is."""
    known, unknown = rank_file(0), rank_file(1)
    known.steps(1)
    known.step(2, queue_depth=2)
    unknown.step(1)
    unknown.step(2, **({"queue_depth": 2} | fields))
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
    lives = ("running", "stopped", "gone", "unknown")
    assert [value("rankscope_rank_life", labels(life=life)) for life in lives] == [0, 0, 1, 0]


def test_completed_where_something_tells(scrape: Make, rank_file: Make) -> None:
    """No completion yet is 0 where completions are told, and nothing where they are not."""
    for pp_rank, completes in enumerate((True, False)):
        rank_file(pp_rank, completes=completes).step(1, completed_total=0)

    value = scrape().get_sample_value

    assert [value("rankscope_collectives_completed_total", labels(pp)) for pp in (0, 1)] == [0, None]


BASES = [(0, "unknown"), (1, "output tokens"), (2, "computed tokens"), (9, "unknown")]


@pytest.mark.parametrize(("lengths", "basis"), BASES)
def test_lengths_basis(scrape: Make, rank_file: Make, lengths: int, basis: str) -> None:
    """A rank says what its lengths count; only output tokens can be trimmed."""
    rank_file(0).step(1, lengths=lengths)

    value = scrape().get_sample_value

    assert value("rankscope_lengths_basis", labels(basis=basis)) == 1
    assert (value("rankscope_trimmed_tokens_total", labels()) is not None) == (basis == "output tokens")


def test_failed_step(scrape: Make, rank_file: Make) -> None:
    """A step that an error ended is failed, not in flight, and says how; once the rank goes on, only the past says so."""
    rank = rank_file(0)
    rank.steps(3)
    rank.fail(4, Phase.DECIDED, method="sample_tokens", kind="AssertionError")
    value = scrape().get_sample_value
    how = labels(phase="decided", method="sample_tokens", kind="AssertionError")

    names = ("failed_steps_total", "step_failed", "failed_step", "step_in_flight", "step_phase")
    assert [value(f"rankscope_{name}", labels()) for name in names] == [1, 1, 4, 0, 3]
    assert value("rankscope_step_in_flight_seconds", labels()) is None
    assert value("rankscope_failed_step_info", how) == 1

    rank.step(5)
    value = scrape().get_sample_value
    assert [value(f"rankscope_{name}", labels()) for name in names] == [1, 0, 4, 0, 4]


def test_failed_step_without_a_report(scrape: Make, rank_file: Make) -> None:
    """Of a failure that the rank did not report any more, step and phase are known, and the rest is unknown."""
    rank = rank_file(0)
    rank.fail(1, Phase.DECIDED, method="sample_tokens", kind="AssertionError")
    rank.fail(2, Phase.SCHEDULED)

    value = scrape().get_sample_value

    assert value("rankscope_failed_step", labels()) == 2
    how = labels(phase="scheduled", method="unknown", kind="unknown")
    assert value("rankscope_failed_step_info", how) == 1


def test_own_time(scrape: Make, rank_file: Make) -> None:
    """Own time is a histogram of measured steps in seconds, absent before the first."""
    rank = rank_file(0)
    rank.steps(1)
    assert "rankscope_own_step_seconds_count" not in names(scrape())

    rank.own_time(b0=1, b1=2, b4=3, b15=1)
    value = scrape().get_sample_value

    bounds = ["2e-06", "8e-06", "3.2e-05", "0.000128", "0.000512", "0.002048", "0.008192", "+Inf"]
    counts = [value("rankscope_own_step_seconds_bucket", labels(le=bound)) for bound in bounds]
    assert counts == [3, 3, 6, 6, 6, 6, 6, 7]
    assert value("rankscope_own_step_seconds_count", labels()) == 7
    assert value("rankscope_own_step_seconds_sum", labels()) == pytest.approx(1e-6 + 4e-6 + 48e-6 + 32768e-6)


def test_faults_by_hook_and_kind(scrape: Make, rank_file: Make) -> None:
    """Faults are told by hook and by the class of the error."""
    faults = {"KeyError": 2, "other": 1}
    hooks = [{"hook": "a", "state": "on"}, {"hook": "b", "state": "removed", "reason": "failed", "faults": faults}]
    rank_file(0).mitigation(MitigationState.AVAILABLE, hooks=hooks)

    value = scrape().get_sample_value

    assert [value("rankscope_hook_faults_total", labels(hook="b", kind=kind)) for kind in faults] == [2, 1]


def test_device_lengths(scrape: Make, rank_file: Make) -> None:
    """A sample of device-side lengths has its step and its age; without sampling there is nothing, before the first sample only their number."""
    off, waits, sampled = (rank_file(pp_rank) for pp_rank in range(3))
    for rank in (off, waits, sampled):
        rank.steps(1)
    waits.device(samples=0, taken_ns=0)
    sampled.device(
        samples=5, step=64, rows=3, total_sum=90, computed_sum=80, excess_rows=1, total_excess=-2, computed_excess=4
    )

    def served(pp_rank: int) -> dict[str, float]:
        families = scrape(
            Query({"pp_rank": frozenset({str(pp_rank)})}), subjects={"device": SUBJECTS["device"]}
        ).collect()
        samples = [s for family in families for s in family.samples if "pp_rank" in s.labels]
        return {s.name.removeprefix("rankscope_device_"): s.value for s in samples}

    found = served(2)
    assert 0 <= found.pop("sample_age_seconds") < 300
    assert found == {
        "samples_total": 5, "sample_step": 64, "sample_requests": 3, "total_length_sum_tokens": 90, "computed_length_sum_tokens": 80,
        "excess_requests": 1, "total_length_excess_tokens": -2, "computed_length_excess_tokens": 4,
    }  # fmt: skip
    assert (served(0), served(1)) == ({}, {"samples_total": 0})


BLIND: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"hooks": [{"hook": "a", "state": "off", "reason": "takes () where (x) was expected"}]}, {"hook off"}),
    ({"hooks": [{"hook": "a", "state": "removed"}, {"hook": "b", "state": "absent"}]}, {"hook removed", "hook absent"}),
    ({"hooks": [{"hook": "_is_all_reqs_chunked_prefill", "state": "absent"}]}, set()),
    ({"hooks": [{"hook": "PPHandler.receive", "state": "absent"}], "pp_size": 1}, set()),
    ({"state": MitigationState.UNKNOWN_CODE}, {"unknown code"}),
    ({"state": MitigationState.NOT_APPLICABLE}, set()),
    ({"runner": "unknown"}, {"unknown code"}),
    ({"detail": 1}, {"over budget"}),
    ({"detail": 2}, {"over budget"}),
    ({"lengths": 1}, set()),
    ({"lengths": 0}, {"lengths unknown"}),
    ({"pid_namespace": 1}, {"life unknown"}),
]


@pytest.mark.parametrize(
    ("case", "expected"), BLIND, ids=lambda value: str(sorted(value) if isinstance(value, set) else value)[:60]
)
def test_blind(scrape: Make, rank_file: Make, case: dict[str, Any], expected: set[str]) -> None:
    """Whatever keeps a part of a rank from being seen is 1 under its reason; what a release may lack is not."""
    identity = {name: case[name] for name in ("runner", "pp_size", "pid_namespace") if name in case}
    rank = rank_file(0, **identity)
    rank.mitigation(case.get("state", MitigationState.AVAILABLE), hooks=case.get("hooks"))
    rank.writer.live[layout.LIVE_DETAIL] = case.get("detail", 0)
    if "lengths" in case:
        rank.step(1, lengths=case["lengths"])

    value = scrape().get_sample_value

    assert {reason for reason in REASONS if value("rankscope_rank_blind", labels(reason=reason))} == expected
    assert all(value("rankscope_rank_blind", labels(reason=reason)) is not None for reason in REASONS)


def test_detail_level(scrape: Make, rank_file: Make) -> None:
    """What a rank still records is one of three levels."""
    rank_file(0).writer.live[layout.LIVE_DETAIL] = 1

    value = scrape().get_sample_value

    levels = ("full", "reduced", "cut")
    assert [value("rankscope_detail_level", labels(level=level)) for level in levels] == [0, 1, 0]


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


def test_failing_collector_is_logged_once(scrape: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A collector that fails at each scrape is logged once for each class of error, and then counted."""
    failures = CollectorFailures()
    errors = iter([KeyError("a"), KeyError("b"), OSError("c"), KeyError("d")])

    def fails(ranks: Sequence[RankReading]) -> list[Metric]:
        raise next(errors)

    for _ in range(4):
        value = scrape(subjects={"drift": fails}, failures=failures).get_sample_value
        value("rankscope_collector_success", {"collector": "drift"})

    assert failures.counts == {("drift", "KeyError"): 3, ("drift", "OSError"): 1}
    assert len(caplog.records) == 2


def test_failures_of_collectors_are_served(scrape: Make) -> None:
    """Failures of earlier scrapes are served."""
    failures = CollectorFailures()
    failures.note("drift", KeyError("a"))

    value = scrape(failures=failures).get_sample_value

    assert value("rankscope_collector_failures_total", {"collector": "drift", "kind": "KeyError"}) == 1


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
