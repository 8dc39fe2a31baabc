"""Traces for Perfetto: checked by their structure, as no viewer is at hand."""

import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ranks import STEP_NS, ManualClock, made_engine, made_rank, made_record, made_records, made_report

from rankscope_exporter.contract import Phase
from rankscope_server.domain.incident import IncidentLife
from rankscope_server.domain.model import Finding, FindingKind, RankId, Severity
from rankscope_server.incidents import perfetto
from rankscope_server.incidents.capture import CaptureSubject, make_capture
from rankscope_server.incidents.perfetto import build_trace, trace_json, trace_of_engine

NOW = ManualClock().now()


def trace(*ranks, marks=()):
    return json.loads(build_trace([trace_of_engine(made_engine(*ranks, now=NOW), marks)]))


def wedge():
    """pp0 skips at step 30 and waits in step 31; pp1 has posted the broadcast of step 30 for five seconds."""
    drift = made_records(1, 29, lambda step: {"drift_max": max(0, step - 10)})
    first = np.concatenate([drift, made_record(30, masked=8, drift_max=20), made_record(31, Phase.STATE_UPDATED)])
    second = np.concatenate([made_records(1, 29), made_record(30, Phase.DECIDED)])
    return (
        made_rank(first, made_report(0), now=NOW, quiet=5.0),
        made_rank(second, made_report(1), now=NOW, quiet=5.0),
    )


def check_structure(made):
    """Every slice lies within the one that it is nested in, and begins no earlier than the one before it ended."""
    slices = defaultdict(list)
    for event in made["traceEvents"]:
        assert event["ph"] in "MXiCsf"
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append(event)
    for track in slices.values():
        stack = []
        ends = [(one["ts"], one["ts"] + one["dur"], one["name"]) for one in track]
        assert [begin for begin, *_ in ends] == sorted(begin for begin, *_ in ends)
        for begin, end, name in ends:
            if name.startswith("step"):
                assert not stack or begin >= stack[-1] - 1e-6
                stack = [end]
            else:
                assert end <= stack[0] + 1e-6
    return slices


def test_a_wedge_in_a_trace():
    """A track per rank; the step that hangs lasts until the copy was made; the disagreement is an arrow."""
    made = trace(*wedge(), marks=[(NOW.unix, "Wedged")])
    slices = check_structure(made)
    names = {
        e["args"]["name"]: e.get("tid") for e in made["traceEvents"] if e["name"] in {"process_name", "thread_name"}
    }

    assert names == {"chat e1": None, "pp0": 1, "pp1": 2}
    assert [one["name"] for one in slices[1, 1]][-2:] == ["step 31 (in flight)", "scheduled, state updated"]
    assert [one["name"] for one in slices[1, 2]][-3:] == ["step 30 (in flight)", "scheduled, state updated", "decided"]
    assert slices[1, 2][-3]["dur"] == pytest.approx((5 + STEP_NS / 2e9) * 1e6)
    flows = [event for event in made["traceEvents"] if event["ph"] in "sf"]
    assert [(event["ph"], event["name"]) for event in flows[-2:]] == [
        ("s", "guard disagreement"),
        ("f", "guard disagreement"),
    ]
    assert {event["tid"] for event in flows[-2:]} == {1, 2}
    assert [e["name"] for e in made["traceEvents"] if e.get("cat") == "disagreement" and e["ph"] == "i"] == [
        *["mask disagreement at step 30"] * 2,
        *["guard disagreement at step 30"] * 2,
    ]
    assert [e["name"] for e in made["traceEvents"] if e.get("cat") == "finding"] == ["Wedged"]


def test_decisions_say_what_they_rest_on():
    """Guard, masks, drift, width, what was posted."""
    made = trace(*wedge())
    decisions = [event for event in made["traceEvents"] if event.get("cat") == "decision" and event["tid"] == 1]

    assert len(decisions) == 30
    assert decisions[-1]["name"] == "skip"
    assert decisions[-1]["args"] == {
        "step": 30, "guard": "skip", "masked": "8 of 8", "drift_max": 20, "width": 1, "posted": 0, "role": "receiver",
    }  # fmt: skip


def test_drift_is_a_counter_that_tells_changes():
    """A sample where it changes, and none where it does not."""
    made = trace(*wedge())
    samples = [event for event in made["traceEvents"] if event["ph"] == "C"]

    assert [event["args"]["tokens"] for event in samples if event["name"] == "drift pp0"] == [0, *range(1, 21), 0]
    assert [event["args"]["tokens"] for event in samples if event["name"] == "drift pp1"] == [0]


def test_clocks_of_nodes_are_aligned():
    """A node whose monotonic clock began an hour earlier shows the same steps at the same time."""
    here = made_rank(made_records(1, 9), made_report(0), now=NOW)
    records = made_records(1, 9)
    for name in ("begin_ns", "decide_ns", "end_ns"):
        records[name] += 3_600_000_000_000
    there = made_rank(records, made_report(1), now=NOW)
    object.__setattr__(there, "clock", type(there.clock)(there.clock.monotonic_ns, here.clock.unix, NOW.monotonic))
    slices = check_structure(trace(here, there))

    assert [one["ts"] for one in slices[1, 1]] == pytest.approx([one["ts"] for one in slices[1, 2]], abs=1.0)


def test_a_failed_step_is_not_in_flight():
    """It ended with the last thing that is known of it."""
    records = np.concatenate([made_records(1, 3), made_record(4, Phase.DECIDED, failed=1)])
    slices = check_structure(trace(made_rank(records, now=NOW, quiet=9.0)))

    assert slices[1, 1][-3]["name"] == "step 4 (failed)"
    assert slices[1, 1][-3]["dur"] == pytest.approx(STEP_NS / 2e3)


def test_too_many_records_are_cut_and_told(monkeypatch):
    """The newest stay."""
    monkeypatch.setattr(perfetto, "MOST_RECORDS", 20)
    made = trace(made_rank(made_records(1, 30), now=NOW), made_rank(made_records(1, 30), made_report(1), now=NOW))
    slices = check_structure(made)

    assert made["otherData"]["steps_left_out"] == 40
    assert slices[1, 1][0]["name"] == "step 21"


def test_nothing_makes_an_empty_trace():
    """Ranks without steps are tracks without slices."""
    made = trace(made_rank(made_records(1, 0), now=NOW))

    assert [event["name"] for event in made["traceEvents"]] == ["process_name", "thread_name", "thread_sort_index"]
    assert json.loads(build_trace([]))["traceEvents"] == []


@pytest.mark.anyio
async def test_a_capture_becomes_the_same_trace():
    """With what had been found as marks."""
    ranks = wedge()
    found = Finding(FindingKind.WEDGED, Severity.CRITICAL, "no rank has moved", 30, (RankId(0, 0, 0),), NOW.unix)
    subject = CaptureSubject(made_engine(*ranks, now=NOW), "i-1", IncidentLife.WEDGED, "", (found,))
    made = await make_capture(subject, NOW)

    assert json.loads(trace_json(made.data)) == trace(*ranks, marks=[(NOW.unix, "wedged: no rank has moved")])


TIMES = st.integers(0, 50).map(lambda number: number * STEP_NS)
PHASES = st.sampled_from([Phase.SCHEDULED, Phase.STATE_UPDATED, Phase.DECIDED, Phase.DONE])
RECORDS = st.lists(st.tuples(st.integers(1, 12), PHASES, st.booleans(), TIMES, TIMES, TIMES, st.sampled_from([0, 1, 2, 9])), max_size=8, unique_by=lambda made: made[0])  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.tuples(RECORDS, RECORDS))
def test_whatever_the_records_say_slices_nest(made):
    """Times out of order, overlapping steps, holes, any phase: still a trace that opens."""
    ranks = []
    for pp, records in enumerate(made):
        whole = [
            made_record(step, phase, failed=failed, begin_ns=begin, decide_ns=decide, end_ns=end, guard=guard)
            for step, phase, failed, begin, decide, end, guard in records
        ]
        ranks.append(made_rank(np.concatenate([made_records(1, 0), *whole]), made_report(pp), now=NOW))
    check_structure(trace(*ranks))
