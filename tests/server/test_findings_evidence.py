"""What a finding rests on: the word of each rank at its step, and the requests."""

import dataclasses

import numpy as np
import pytest
from made_ranks import (
    ManualClock,
    made_control,
    made_engine,
    made_rank,
    made_record,
    made_records,
    made_report,
    made_v2_record,
    made_v2_records,
    made_v2_report,
)

from rankscope_exporter.contract import (
    ControlOutcome,
    HookReport,
    HookState,
    MitigationState,
    Phase,
    RankLife,
    RequestRow,
    RequestTable,
    Role,
)
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.model import FindingKind
from rankscope_server.domain.requests import short_request

NOW = ManualClock().now()


def look(*ranks, memory=None):
    return assess(made_engine(*ranks, now=NOW), memory or EngineMemory(), NOW)


def pair(first, second, *, rows=(), quiet=0.0):
    """Two ranks, of which the first one's table holds `rows`."""
    one = made_rank(first, made_report(0), now=NOW, quiet=quiet)
    other = made_rank(second, made_report(1), now=NOW, quiet=quiet)
    table = RequestTable(key="k", engine="e1", dp_rank=0, pp_rank=0, tp_rank=0, drifting=len(rows), rows=list(rows))
    return dataclasses.replace(one, requests=table), other


def row(name, *, drift=3, first=5, step=40, masked=False):
    return RequestRow(
        request_id=name, state_length=20 + drift, scheduler_length=20, drift=drift, masked=masked,
        first_drift_step=first, step=step,
    )  # fmt: skip


def words(finding):
    return {value.label: value.value for value in finding.evidence.values}


def test_a_guard_disagreement_says_what_each_rank_decided():
    """Decision and mask of each rank at the first step."""
    memory = look(*pair(made_records(1, 40, lambda s: {"masked": 8} if s == 40 else {}), made_records(1, 40)))
    assert words(memory.findings[FindingKind.GUARD_DISAGREEMENT, 0]) == {
        "pp0": "skips the collective, all 8 requests masked",
        "pp1": "broadcasts, none of 8 requests masked",
    }
    assert words(memory.findings[FindingKind.MASK_DISAGREEMENT, 0]) == {
        "pp0": "masks all 8 requests",
        "pp1": "masks none of 8 requests",
    }


def test_a_batch_mismatch_says_what_each_rank_was_given():
    """Requests and tokens of the first step that differs."""
    other = made_records(
        1, 20, lambda s: {"batch_hash": 5, "new": 4, "cached": 2, "scheduled_tokens": 31} if s >= 14 else {}
    )
    memory = look(*pair(made_records(1, 20), other))
    assert words(memory.findings[FindingKind.BATCH_MISMATCH, 0]) == {
        "pp0": "0 new, 8 cached, 8 tokens",
        "pp1": "4 new, 2 cached, 31 tokens",
    }


def test_a_width_mismatch_says_how_each_rank_posts():
    """Collectives and columns."""
    second = [made_v2_records(1, 33, role=Role.SENDER), made_v2_record(34, Phase.DECIDED, role=Role.SENDER, width=1)]
    ranks = [
        made_rank(records, made_v2_report(pp), now=NOW)
        for pp, records in enumerate([made_v2_records(1, 34), np.concatenate(second)])
    ]
    assert words(look(*ranks).findings[FindingKind.WIDTH_MISMATCH, 0]) == {
        "pp0": "posts 3 collectives, 4 columns",
        "pp1": "posts 2 collectives, 1 column",
    }


def test_a_stall_says_where_each_rank_stands():
    """Step, phase, and for how long."""
    records = np.concatenate([made_records(1, 71), made_record(72, Phase.DECIDED)])
    memory = look(*pair(records, made_records(1, 71), quiet=14))
    assert words(memory.findings[FindingKind.STALLED, 0]) == {
        "pp0": "in step 72, decided, for 14 s",
        "pp1": "after step 71, for 14 s",
    }


def test_a_lost_rank_says_how():
    """What became of its process, at which step."""
    lost = made_rank(made_records(1, 30), made_report(0, life=RankLife.GONE), now=NOW)
    memory = look(lost, made_rank(made_records(1, 30), made_report(1), now=NOW))
    assert words(memory.findings[FindingKind.RANK_LOST, 0]) == {"pp0": "is gone (pid 4000) at step 30"}


def test_a_mixture_says_where_the_fix_stands_on_each_rank():
    """Also why it could not act."""
    on = made_rank(
        made_records(1, 9, lambda _: {"mitigation": MitigationState.APPLIED}),
        made_report(0, trim=MitigationState.APPLIED),
        now=NOW,
    )
    refused = made_control(3, outcome=ControlOutcome.REFUSED)
    off = made_rank(made_records(1, 9), made_report(1, trim_reason="two gated trims", control=refused), now=NOW)
    assert words(look(on, off).findings[FindingKind.MITIGATION_MIXED, 0]) == {
        "pp0": "applied",
        "pp1": "available: two gated trims",
    }


def test_blindness_says_what_is_not_seen_of_each_rank():
    """Only of those that it is about."""
    hooks = [HookReport(hook="guard", state=HookState.REMOVED, reason="5 faults")]
    blind = made_rank(made_records(1, 9), made_report(0, hooks=hooks), now=NOW)
    finding = look(blind, made_rank(made_records(1, 9), made_report(1), now=NOW)).findings[FindingKind.BLIND, -1]
    assert words(finding) == {"pp0": finding.sentence}


def drifting(step):
    return {"drift_max": step, "drifting": 2} if step >= 12 else {}


def test_drift_names_the_request_with_which_it_began():
    """The sentence has the last characters of its id, the evidence all of it, those that drift for longest first."""
    rows = [row("chatcmpl-b9e2", first=31, drift=9), row("chatcmpl-a7f2", first=12, drift=4)]
    finding = look(*pair(made_records(1, 40, drifting), made_records(1, 40), rows=rows)).findings[FindingKind.DRIFT, 0]
    assert finding.sentence == (
        "pp0 counts up to 40 tokens more than the scheduler in 2 requests; drift began at step 12 with request ...a7f2; "
        "pp1 agrees with the scheduler"
    )
    assert words(finding) == {"pp0": "+40 tokens in 2 requests"}
    assert (finding.evidence.began_with, finding.evidence.requests) == (
        "chatcmpl-a7f2",
        ("chatcmpl-a7f2", "chatcmpl-b9e2"),
    )


def test_the_request_with_which_drift_began_is_remembered():
    """It ends before the others do."""
    memory = look(*pair(made_records(1, 40, drifting), made_records(1, 40), rows=[row("first", first=12)]))
    ranks = pair(made_records(1, 50, drifting), made_records(1, 50), rows=[row("second", first=33, step=50)])
    finding = look(*ranks, memory=memory).findings[FindingKind.DRIFT, 0]
    assert "began at step 12 with request first" in finding.sentence
    assert finding.evidence.requests == ("first", "second")


@pytest.mark.parametrize("rows", [[], [row("later", first=33)], [row("", first=12)], [row("old", first=3, step=9)]])
def test_no_other_request_is_said_to_have_begun(rows):
    """One that ended before the table was read is not known; an id that is left out is none, and old rows are of earlier drift."""
    finding = look(*pair(made_records(1, 40, drifting), made_records(1, 40), rows=rows)).findings[FindingKind.DRIFT, 0]
    assert ", since step 12; pp1" in finding.sentence
    assert finding.evidence.began_with == ""


def parted(last):
    return made_records(1, last, lambda s: {"masked": 8} if s == 40 else {})


def test_requests_of_a_disagreement_are_filled_in_when_they_are_known():
    """The table comes up to a second later; the sentence stays the first one."""
    memory = look(*pair(parted(40), made_records(1, 40)))
    before = memory.findings[FindingKind.GUARD_DISAGREEMENT, 0]
    assert before.evidence.requests == ()
    rows = [row("mild", masked=True), row("worst", drift=30, masked=True), row("kept", drift=99)]
    memory = look(*pair(parted(40), made_records(1, 40), rows=rows), memory=memory)
    after = memory.findings[FindingKind.GUARD_DISAGREEMENT, 0]
    assert after.evidence.requests == ("worst", "mild")
    assert dataclasses.replace(after, evidence=before.evidence) == before
    memory = look(*pair(parted(40), made_records(1, 40), rows=[row("other", masked=True)]), memory=memory)
    assert memory.findings[FindingKind.GUARD_DISAGREEMENT, 0].evidence.requests == ("worst", "mild")


@pytest.mark.parametrize("rows", [[row("late", first=41, step=42, masked=True)], [row("turn", step=41, masked=True)]])
def test_requests_of_another_batch_are_not_of_the_disagreement(rows):
    """Those that began to drift after it, and those of the batch whose turn it was next."""
    memory = look(*pair(parted(42), made_records(1, 42), rows=rows))
    assert memory.findings[FindingKind.GUARD_DISAGREEMENT, 0].evidence.requests == ()


def test_a_wedge_names_the_requests_of_its_disagreement():
    """So that one need not look them up at another finding."""
    first = np.concatenate([parted(40), made_record(41, Phase.STATE_UPDATED)])
    second = np.concatenate([made_records(1, 39), made_record(40, Phase.DECIDED, role=Role.SENDER)])
    ranks = pair(first, second, rows=[row("r1", masked=True)], quiet=5)
    finding = look(*ranks, memory=look(*ranks)).findings[FindingKind.WEDGED, 0]
    assert finding.evidence.requests == ("r1",)
    assert words(finding) == {"pp0": "in step 41, state updated, for 5.0 s", "pp1": "in step 40, decided, for 5.0 s"}


def test_short_ids_stand_in_full():
    """There is nothing to save."""
    assert (short_request("r1"), short_request("chatcmpl-07f2")) == ("r1", "...07f2")
