"""What is called wrong on engines with the V2 model runner, and what is not."""

import numpy as np
import pytest
from made_ranks import (
    ManualClock,
    made_device,
    made_engine,
    made_rank,
    made_records,
    made_report,
    made_v2_record,
    made_v2_records,
    made_v2_report,
)

from rankscope_exporter.contract import Guard, HookReport, HookState, MitigationState, Phase, Role
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.model import FindingKind, Severity, State
from rankscope_server.domain.sight import describe_unknown_code
from rankscope_server.domain.state import drift_by_rank, engine_state
from rankscope_server.domain.toggle import plan_engine
from rankscope_server.domain.view import explain_unknown_drift, explain_unknown_requests

NOW = ManualClock().now()
SENDER = Role.SENDER


def two(first, second, *, quiet=0.0, now=NOW, left=None, right=None):
    return [
        made_rank(records, made_v2_report(pp, **(changes or {})), now=now, quiet=quiet)
        for pp, (records, changes) in enumerate([(first, left), (second, right)])
    ]


def look(ranks, memory=None, now=NOW):
    return assess(made_engine(*ranks, now=now), memory or EngineMemory(), now)


def kinds(memory):
    return {finding.kind for finding in memory.all_findings if finding.open}


def healthy(last=50, **changes):
    return two(made_v2_records(1, last), made_v2_records(1, last, role=SENDER), **changes)


def test_ranks_that_agree_are_healthy():
    """Nothing is found, and nothing is called unseen."""
    ranks = healthy()
    assert kinds(look(ranks)) == set()
    assert engine_state(made_engine(*ranks, now=NOW), look(ranks)) is State.HEALTHY


def test_drift_without_device_lengths_is_unknown_and_says_how_to_know_it():
    """The lengths on the host are copies: whatever they say is no drift, and no proof that there is none."""
    first = made_v2_records(1, 50, lambda _: {"drift_max": 3, "drifting": 2})
    engine = made_engine(*two(first, made_v2_records(1, 50, role=SENDER)), now=NOW)
    memory = assess(engine, EngineMemory(), NOW)
    assert kinds(memory) == set()
    assert drift_by_rank(engine) == (("pp0", None), ("pp1", None))
    assert "RANKSCOPE_DEVICE_LENGTHS_STEPS" in explain_unknown_drift(engine)
    assert explain_unknown_requests(engine).startswith("Not known on V2")


def test_lengths_that_could_not_be_sampled_say_why():
    """The hook's reason is what helps."""
    hook = HookReport(hook="device_lengths", state=HookState.OFF, reason="AttributeError: no total_len")
    engine = made_engine(*healthy(left={"hooks": [hook]}), now=NOW)
    assert "AttributeError: no total_len" in explain_unknown_drift(engine)


def test_an_excess_on_the_device_is_drift():
    """One sample is enough, and says when it was taken; the next sample without an excess closes the finding."""
    ranks = healthy(left={"device": made_device(5)}, right={"device": made_device(-3)})
    memory = look(ranks)
    finding = memory.findings[FindingKind.DRIFT, 0]
    assert (finding.step, finding.severity) == (96, Severity.WARNING)
    assert finding.sentence == (
        "pp0 holds up to 5 tokens more on its device than the scheduler allows in 2 of 8 requests, as sampled at step 96, "
        "since step 96; pp1 agrees with the scheduler"
    )
    assert finding.since_unix == pytest.approx(NOW.unix - 4)
    assert drift_by_rank(made_engine(*ranks, now=NOW)) == (("pp0", 5), ("pp1", -3))
    assert kinds(look(healthy(left={"device": made_device(0, step=128)}), memory)) == set()


def test_the_age_of_a_sample_grows_with_its_report():
    """An exporter that answers no more makes no sample look young; an age that is not known is not made up."""
    later = Moment(NOW.unix + 2, NOW.monotonic + 2)
    first, last = healthy(left={"device": made_device(5)}, right={"device": made_device(5, age=None)})
    assert (first.device_age_seconds(later), last.device_age_seconds(later)) == (6.0, None)
    assert last.device is not None


def test_a_guard_disagreement_is_found_as_on_v1():
    """A rank that skips what the other sends; that alone is no mismatch of widths as well."""
    first = made_v2_records(1, 40, lambda s: {"masked": 8, "guard": Guard.SKIP, "posted": 0} if s == 34 else {})
    memory = look(two(first, made_v2_records(1, 40, role=SENDER)))
    assert memory.findings[FindingKind.GUARD_DISAGREEMENT, 0].step == 34
    assert FindingKind.MASK_DISAGREEMENT in kinds(memory)
    assert FindingKind.WIDTH_MISMATCH not in kinds(memory)


def test_different_widths_are_found_while_the_step_is_in_flight():
    """Both have decided; neither needs to have left."""
    first = np.concatenate([made_v2_records(1, 33), made_v2_record(34, Phase.DECIDED)])
    second = np.concatenate(
        [made_v2_records(1, 33, role=SENDER), made_v2_record(34, Phase.DECIDED, role=SENDER, width=1)]
    )
    ranks = two(first, second)
    finding = look(ranks).findings[FindingKind.WIDTH_MISMATCH, 0]
    assert (finding.step, finding.severity) == (34, Severity.CRITICAL)
    assert finding.sentence == (
        "at step 34 pp0 posts the sampled tokens 4 columns wide and pp1 posts the sampled tokens 1 column wide: "
        "the exchange hangs, or mixes tokens up"
    )
    assert engine_state(made_engine(*ranks, now=NOW), look(ranks)) is State.PARTED


def test_a_width_that_is_not_known_differs_from_nothing():
    """A receiver may not know it before it has received."""
    assert (
        kinds(look(two(made_v2_records(1, 40, lambda _: {"width": 0}), made_v2_records(1, 40, role=SENDER)))) == set()
    )


def test_collectives_count_once_both_have_left_the_step():
    """The sender posts its drafts last: until it has left the step its count is one short, rightly."""
    first = made_v2_records(1, 40)
    in_flight = np.concatenate([made_v2_records(1, 39, role=SENDER), made_v2_record(40, Phase.DECIDED, role=SENDER)])
    assert kinds(look(two(first, in_flight))) == set()
    without = np.concatenate([in_flight[:39], made_v2_record(40, role=SENDER, posted=2)])
    finding = look(two(first, without)).findings[FindingKind.WIDTH_MISMATCH, 0]
    assert finding.sentence.startswith("at step 40 pp0 posted 3 collectives and pp1 posted 2 collectives")


@pytest.mark.parametrize(
    "changes",
    [{"faults": 1}, {"hooks": [HookReport(hook="PPHandler.broadcast_drafts", state=HookState.REMOVED)]}],
)
def test_a_rank_that_may_have_missed_one_proves_no_mismatch(changes):
    """A hook of ours that failed is no disagreement of vLLM's ranks."""
    second = made_v2_records(1, 40, lambda s: {"posted": 2} if s == 34 else {}, role=SENDER)
    assert FindingKind.WIDTH_MISMATCH not in kinds(look(two(made_v2_records(1, 40), second, right=changes)))


def test_widths_of_v1_are_not_compared():
    """There a receiver's width is that of what it keeps."""
    ranks = [
        made_rank(made_records(1, 40, lambda _, pp=pp: {"width": 1 + pp}), made_report(pp), now=NOW) for pp in (0, 1)
    ]
    assert kinds(look(ranks)) == set()


def test_a_mismatch_and_then_silence_is_a_wedge():
    """It is a disagreement like the others."""
    first = np.concatenate([made_v2_records(1, 33), made_v2_record(34, Phase.DECIDED)])
    second = np.concatenate(
        [made_v2_records(1, 33, role=SENDER), made_v2_record(34, Phase.DECIDED, role=SENDER, width=1)]
    )
    assert FindingKind.WEDGED in kinds(look(two(first, second, quiet=8)))


def test_no_toggle_on_v2():
    """There is nothing to trim, whatever else there is about the engine."""
    engine = made_engine(*healthy(), now=NOW, control=False, token=False)
    plan = plan_engine(engine, EngineMemory(), 20.0, NOW, desired=True)
    assert plan.refusal == "not applicable on V2: it keeps no output tokens to trim"


def test_unknown_code_tells_what_is_still_observed():
    """Which ranks, that the fix is off, what is seen and what is not, and what to do."""
    hooks = [
        HookReport(hook="execute_model", state=HookState.ON),
        HookReport(hook="_update_states", state=HookState.OFF, reason="takes (batch)"),
        HookReport(hook="_pp_broadcast_prev_sampled_token_ids", state=HookState.ON),
    ]
    unknown = {"runner": "V1", "trim": MitigationState.UNKNOWN_CODE, "trim_reason": "two gated trims", "hooks": hooks}
    ranks = [made_rank(made_records(1, 9), made_v2_report(pp, **unknown), now=NOW) for pp in (0, 1)]
    assert describe_unknown_code(made_engine(*ranks, now=NOW)) == (
        "pp0 and pp1 run code that Rankscope does not know: two gated trims. The trim fix is off and cannot be turned on here. "
        "Still observed: steps and batches and guard decisions. Not observed: request-state lengths and drift. "
        "Run rankscope-exporter doctor beside vLLM and report what it prints."
    )
    assert describe_unknown_code(made_engine(*healthy(), now=NOW)) == ""
