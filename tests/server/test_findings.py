"""What is called wrong, and what is not."""

import dataclasses
import math

import numpy as np
import pytest
from made_ranks import (
    START_UNIX,
    ManualClock,
    begin_ns,
    made_control,
    made_engine,
    made_rank,
    made_record,
    made_records,
    made_report,
)

from rankscope_exporter.contract import (
    ControlOutcome,
    Detail,
    Guard,
    HookReport,
    HookState,
    MitigationState,
    Phase,
    RankLife,
    Role,
)
from rankscope_exporter.hooks.targets import V1_POINTS, V2_HANDLER_POINTS, V2_MODULE_POINTS
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import OPTIONAL_HOOKS
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.model import FindingKind, RankId, Severity, State
from rankscope_server.domain.state import engine_headline, engine_state

NOW = ManualClock().now()


def look(*ranks, memory=None, now=NOW, **engine):
    return assess(made_engine(*ranks, now=now, **engine), memory or EngineMemory(), now)


def kinds(memory):
    return {finding.kind for finding in memory.all_findings if finding.open}


def two(first, second, *, quiet=0.0, **reports):
    return made_rank(first, made_report(0, **reports), now=NOW, quiet=quiet), made_rank(
        second, made_report(1, **reports), now=NOW, quiet=quiet
    )


def test_ranks_that_agree_are_healthy():
    """Equal records give no finding."""
    ranks = two(made_records(1, 50), made_records(1, 50))
    memory = look(*ranks)
    assert kinds(memory) == set()
    assert list(memory.seen.values()) == [rank.history.revision for rank in ranks]


def test_a_rank_that_is_a_few_steps_behind_is_healthy():
    """What a rank has not reached yet disagrees with nothing."""
    ahead = np.concatenate([made_records(1, 52), made_record(53, Phase.SCHEDULED)])
    assert kinds(look(*two(ahead, made_records(1, 50)))) == set()


def test_a_guard_disagreement_is_found_at_its_step():
    """One step at which one rank skips and the other broadcasts is enough, and says when the second one decided."""
    first = made_records(1, 40, lambda step: {"masked": 8} if step == 40 else {})
    memory = look(*two(first, made_records(1, 40)))
    found = memory.findings[FindingKind.GUARD_DISAGREEMENT, 0]
    assert (found.step, found.severity) == (40, Severity.CRITICAL)
    assert (
        found.sentence
        == "at step 40 pp1 broadcasts the sampled tokens and pp0 skips the collective (it masks all 8 requests)"
    )
    assert found.since_unix == pytest.approx(START_UNIX + begin_ns(40) / 1e9 + 0.01)
    assert found.found_unix == NOW.unix


def test_ranks_that_say_the_same_speak_with_one_voice():
    """Many pipeline ranks make no long sentence; ranks whose words are equal though they differ are told one by one."""
    skipping = made_records(1, 40, lambda step: {"masked": 8, "mask_hash": 5} if step == 40 else {})
    records = [skipping, skipping, skipping, made_records(1, 40)]
    memory = look(*(made_rank(one, made_report(pp, pp_size=4), now=NOW) for pp, one in enumerate(records)))
    assert (
        memory.findings[FindingKind.GUARD_DISAGREEMENT, 0].sentence
        == "at step 40 pp3 broadcasts the sampled tokens and pp0, pp1 and pp2 skip the collective (they mask all 8 requests)"
    )
    assert memory.findings[FindingKind.MASK_DISAGREEMENT, 0].sentence.startswith(
        "at step 40 pp0, pp1 and pp2 mask all 8 requests and pp3 masks none of 8 requests:"
    )
    others = [
        made_records(1, 40, lambda step, other=other: {"masked": 1, "mask_hash": other} if step == 40 else {})
        for other in (5, 6)
    ]
    sentence = look(*two(*others)).findings[FindingKind.MASK_DISAGREEMENT, 0].sentence
    assert sentence.startswith("at step 40 pp0 masks 1 of 8 requests and pp1 masks 1 of 8 requests:")


def test_a_decision_that_was_not_seen_disagrees_with_nothing():
    """No decision yet is not the opposite of a decision."""
    first = np.concatenate([made_records(1, 39), made_record(40, Phase.STATE_UPDATED)])
    assert kinds(look(*two(first, made_records(1, 40)))) == set()
    for guard in (Guard.NONE, 3, 255):  # also a word of a later release, or of a damaged file
        first = made_records(1, 40, lambda _, guard=guard: {"guard": guard})
        assert kinds(look(*two(first, made_records(1, 40)))) == set()


def test_a_disagreement_is_found_when_the_slower_rank_comes_up_to_it():
    """What was looked at before is not settled until both ranks are done with it."""
    skipping = made_records(1, 40, lambda step: {"masked": 8} if step == 38 else {})
    memory = look(*two(skipping, made_records(1, 37)))
    assert FindingKind.GUARD_DISAGREEMENT not in kinds(memory)
    memory = look(*two(skipping, made_records(1, 39)), memory=memory)
    assert memory.findings[FindingKind.GUARD_DISAGREEMENT, 0].step == 38


def test_a_mask_disagreement_counts_only_where_both_masks_are_known():
    """A rank whose mask is not known says nothing about the other."""
    first = made_records(1, 20, lambda step: {"masked": 2} if step == 9 else {})
    assert kinds(look(*two(first, made_records(1, 20)))) == {FindingKind.MASK_DISAGREEMENT}
    assert kinds(look(*two(first, made_records(1, 20, lambda _: {"mask_known": 0})))) == set()


def test_a_batch_mismatch_is_found_at_its_step():
    """Different rolling hashes at the same ordinal mean different batches."""
    other = made_records(1, 20, lambda step: {"batch_hash": 5 if step >= 14 else 77 + step})
    memory = look(*two(made_records(1, 20), other))
    assert memory.findings[FindingKind.BATCH_MISMATCH, 0].step == 14


def test_disagreements_stay_for_the_life_of_the_engine():
    """Ranks that agree again do not undo what happened; the sentence says when they last differed."""
    first = made_records(1, 20, lambda step: {"masked": 2} if step in {9, 11} else {})
    memory = look(*two(first, made_records(1, 20)))
    memory = look(*two(made_records(1, 600), made_records(1, 600)), memory=memory)
    finding = next(f for f in memory.all_findings if f.kind is FindingKind.MASK_DISAGREEMENT)
    assert finding.open
    assert finding.step == 9
    assert finding.sentence.endswith("(again since, last at step 11)")


def test_tensor_parallel_ranks_are_compared_all_together():
    """The disagreement of two ranks of one stage is one, too."""
    sizes = {"tp_size": 2}
    ranks = [
        made_rank(made_records(1, 9), made_report(pp, tp_rank=tp, **sizes), now=NOW) for pp in (0, 1) for tp in (0, 1)
    ]
    assert kinds(look(*ranks)) == set()
    ranks[3] = made_rank(
        made_records(1, 9, lambda s: {"masked": 8} if s == 7 else {}), made_report(1, tp_rank=1, **sizes), now=NOW
    )
    assert look(*ranks).findings[FindingKind.GUARD_DISAGREEMENT, 0].step == 7


def test_data_parallel_ranks_take_their_own_steps():
    """Ranks of different data-parallel ranks run different batches, rightly."""
    ranks = [
        made_rank(
            made_records(1, 9, lambda s, dp=dp: {"batch_hash": s * 10 + dp}), made_report(pp, dp_rank=dp), now=NOW
        )
        for dp in (0, 1)
        for pp in (0, 1)
    ]
    assert kinds(look(*ranks)) == set()


@pytest.mark.parametrize(("steps", "found"), [({12}, False), ({12, 13}, True), ({12, 14}, True), ({12, 16}, False)])
def test_drift_counts_once_it_lasts(steps, found):
    """One drifting step is none; two turns of the same batch are, with two batches in flight also with one between."""
    first = made_records(1, 17, lambda step: {"drift_max": 3, "drifting": 1} if step in steps else {})
    second = made_records(1, 17)
    memory = look(*two(np.concatenate([first[:14]]), second[:14])) if max(steps) <= 14 else look(*two(first, second))
    assert (FindingKind.DRIFT in kinds(memory)) is found
    if found:
        assert memory.findings[FindingKind.DRIFT, 0].step == 12


def test_drift_below_zero_is_none():
    """A rank that counts less than the scheduler is late, not wrong."""
    first = made_records(1, 20, lambda _: {"drift_max": -3, "drift_sum": -24})
    assert kinds(look(*two(first, made_records(1, 20)))) == set()


def test_drift_that_was_not_measured_is_unknown():
    """Without lengths there is no drift, and the engine is blind rather than healthy."""
    first = made_records(1, 20, lambda _: {"drift_max": 3, "lengths": 0})
    memory = look(*two(first, made_records(1, 20)))
    assert kinds(memory) == {FindingKind.BLIND}


def test_drift_closes_when_it_is_over_and_is_remembered():
    """With the fix on, the next steps show no drift, and the finding becomes a closed one."""
    memory = look(*two(made_records(1, 20, lambda s: {"drift_max": s, "drifting": 2}), made_records(1, 20)))
    finding = memory.findings[FindingKind.DRIFT, 0]
    assert (
        finding.sentence
        == "pp0 counts up to 20 tokens more than the scheduler in 2 requests, since step 1; pp1 agrees with the scheduler"
    )
    memory = look(*two(made_records(1, 26), made_records(1, 26)), memory=memory)
    assert kinds(memory) == set()
    assert [(f.kind, f.step) for f in memory.closed] == [(FindingKind.DRIFT, 1)]


def test_an_idle_engine_has_no_drift():
    """Its requests have ended, and with them what they had drifted."""
    ranks = two(made_records(1, 20, lambda _: {"drift_max": 3, "drifting": 1}), made_records(1, 20), quiet=30)
    memory = look(*ranks)
    assert kinds(memory) == set()
    assert engine_state(made_engine(*ranks, now=NOW), memory) is State.IDLE


def wedge(quiet):
    first = np.concatenate(
        [made_records(1, 72, lambda s: {"masked": 8} if s == 72 else {}), made_record(73, Phase.STATE_UPDATED)]
    )
    second = np.concatenate([made_records(1, 71), made_record(72, Phase.DECIDED, role=Role.SENDER)])
    return made_rank(first, made_report(0), now=NOW, quiet=quiet), made_rank(
        second, made_report(1), now=NOW, quiet=quiet
    )


def test_ranks_that_parted_and_stand_still_are_wedged():
    """A disagreement, then nothing moves with a step in flight."""
    ranks = wedge(4.0)
    memory = look(*ranks)
    assert kinds(memory) == {FindingKind.WEDGED, FindingKind.GUARD_DISAGREEMENT, FindingKind.MASK_DISAGREEMENT}
    engine = made_engine(*ranks, now=NOW)
    assert engine_state(engine, memory) is State.WEDGED
    assert engine_headline(engine, memory, NOW).startswith(
        "Wedged: at step 72 pp1 broadcasts the sampled tokens and pp0 skips"
    )


def test_a_wedge_of_many_ranks_is_told_in_a_sentence():
    """Ranks that stand at the same place are told together."""
    skipping, sending = wedge(4.0)
    many = [
        dataclasses.replace(rank, id=RankId(0, pp, tp), label=f"pp{pp} tp{tp}")
        for pp, rank in enumerate((skipping, sending))
        for tp in range(12)
    ]
    assert look(*many).findings[FindingKind.WEDGED, 0].sentence == (
        "pp1 tp0, pp1 tp1, pp1 tp2, pp1 tp3, pp1 tp4 and 7 others posted the broadcast of step 72 and never came back; "
        "pp0 tp0, pp0 tp1, pp0 tp2, pp0 tp3, pp0 tp4 and 7 others are in step 73: "
        "no rank has moved for 4.0 s, and none will until the engine is restarted"
    )


def test_ranks_that_parted_a_moment_ago_are_not_wedged_yet():
    """They have parted; whether they stand still is not known yet."""
    memory = look(*wedge(0.5))
    assert FindingKind.WEDGED not in kinds(memory)
    assert engine_state(made_engine(*wedge(0.5), now=NOW), memory) is State.PARTED


def test_a_wedge_outlives_a_look_into_its_processes():
    """A debugger stops one for a moment; that alone is neither a wedge nor the end of one."""
    first, second = wedge(10.0)
    stopped = made_rank(
        first.history.tail(100), made_report(0, life=RankLife.STOPPED), now=NOW, quiet=10, life_since=NOW.monotonic
    )
    assert FindingKind.WEDGED in kinds(look(stopped, second, memory=look(first, second)))
    assert FindingKind.WEDGED not in kinds(look(stopped, second))


def test_a_wedge_outlives_its_processes():
    """Killing a rank of a wedged engine makes it lost as well, not healthy."""
    memory = look(*wedge(10.0))
    first, second = wedge(60.0)
    gone = made_rank(
        first.history.tail(100), made_report(0, life=RankLife.GONE), now=NOW, quiet=60, first_seen=0, life_since=900
    )
    memory = look(gone, second, memory=memory)
    assert {FindingKind.WEDGED, FindingKind.RANK_LOST} <= kinds(memory)


def test_an_exporter_that_is_not_reached_makes_no_wedge():
    """Old data make an engine blind; how long ranks stood still is told by their node's clock alone."""
    first, second = wedge(0.2)
    later = Moment(NOW.unix + 60, NOW.monotonic + 60)
    memory = look(first, second, now=later, answered=NOW.monotonic, error="connection refused")
    assert FindingKind.WEDGED not in kinds(memory)
    blind = memory.findings[FindingKind.BLIND, -1]
    assert blind.sentence == "the exporter of pp0 and pp1 (http://a:9610) last answered 60 s ago: connection refused"


def test_a_server_that_had_no_time_to_ask_blames_no_exporter():
    """Data of some seconds are old only if somebody failed to answer."""
    ranks = two(made_records(1, 9), made_records(1, 9))
    later = Moment(NOW.unix + 5, NOW.monotonic + 5)
    assert kinds(look(*ranks, now=later, answered=NOW.monotonic)) == set()
    assert kinds(look(*ranks, now=later, answered=NOW.monotonic, error="timed out")) == {FindingKind.BLIND}


def frozen(quiet, step=72):
    records = np.concatenate([made_records(1, step - 1), made_record(step, Phase.SCHEDULED)])
    return two(records, records, quiet=quiet)


def test_ranks_that_agree_and_stand_still_are_stalled():
    """Frozen equal is not a wedge: a warning first, critical when it lasts."""
    memory = look(*frozen(15))
    assert kinds(memory) == {FindingKind.STALLED}
    assert memory.findings[FindingKind.STALLED, 0].severity is Severity.WARNING
    assert look(*frozen(90), memory=memory).findings[FindingKind.STALLED, 0].severity is Severity.CRITICAL


def test_the_first_steps_may_take_long():
    """They compile."""
    assert kinds(look(*frozen(30, step=1))) == set()


def test_slow_steps_are_no_stall():
    """The limit follows what a step usually takes."""
    records = np.concatenate(
        [made_records(1, 40, lambda s: {"end_ns": begin_ns(s) + 2_000_000_000}), made_record(41, Phase.SCHEDULED)]
    )
    assert kinds(look(*two(records, records, quiet=30))) == set()


def test_an_engine_that_was_replaced_is_not_lost():
    """A restart is no alarm, even if the last step never ended."""
    records = np.concatenate([made_records(1, 3), made_record(4, Phase.DECIDED)])
    ranks = [made_rank(records, made_report(pp, life=RankLife.GONE), now=NOW, quiet=99) for pp in (0, 1)]
    assert kinds(look(*ranks)) == {FindingKind.RANK_LOST}
    assert kinds(look(*ranks, replaced=True)) == set()


def test_ranks_of_which_one_has_the_fix_are_mixed():
    """Two answers a second apart show it, or one step that both have taken."""
    on = made_rank(
        made_records(1, 9, lambda _: {"mitigation": MitigationState.APPLIED}),
        made_report(0, trim=MitigationState.APPLIED),
        now=NOW,
    )
    off = made_rank(made_records(1, 9), made_report(1), now=NOW)
    found = look(on, off).findings[FindingKind.MITIGATION_MIXED, 0]
    assert "the trim fix is on at pp0 and not at pp1" in found.sentence
    engine = made_engine(on, off, now=NOW)
    assert engine_state(engine, look(on, off)) is State.MITIGATION_MIXED
    assert engine_state(engine, look(on, off)).label == "mitigation mixed"


def test_a_toggle_under_way_is_not_mixed():
    """Ranks are asked one after the other; what counts is whether they acted at the same step."""
    pending = made_control(3, 3, outcome=ControlOutcome.PENDING)
    on = made_rank(made_records(1, 9), made_report(0, trim=MitigationState.APPLIED, control=made_control(3)), now=NOW)
    off = made_rank(made_records(1, 9), made_report(1, control=pending), now=NOW)
    assert kinds(look(on, off)) == set()


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (
            {"hooks": [HookReport(hook="_update_states", state=HookState.OFF, reason="two gated trims")]},
            "hook _update_states of pp0 is off: two gated trims",
        ),
        (
            {"hooks": [HookReport(hook="guard", state=HookState.REMOVED, reason="5 faults")]},
            "hook guard of pp0 is removed: 5 faults",
        ),
        (
            {"trim": MitigationState.UNKNOWN_CODE, "trim_reason": "bytecode differs"},
            "pp0 runs code that the trim fix does not know: bytecode differs",
        ),
        (
            {"runner": "unknown", "runner_class": "HpuRunner"},
            "pp0 runs a model runner that Rankscope does not know (HpuRunner): run rankscope-exporter doctor",
        ),
        (
            {"hooks": [HookReport(hook="pp_receive", state=HookState.REMOVED, reason="failed 10 times")]},
            "so guard decisions cannot be seen (it stays off until vLLM is restarted)",
        ),
        (
            {"hooks": [HookReport(hook="_update_states", state=HookState.ABSENT, reason="no such method")]},
            "hook _update_states of pp0 is absent: no such method, so request-state lengths and drift cannot be seen",
        ),
        (
            {"detail": Detail.REDUCED},
            "pp0 is over its budget of own time and keeps no drifting requests: raise RANKSCOPE_BUDGET_MICROSECONDS",
        ),
        ({"detail": Detail.CUT}, "pp0 is over its budget of own time and took its costliest hook out"),
    ],
)
def test_what_is_not_seen_is_said(report, words):
    """A hook that is off, code that is not known: blind, with the reason, never healthy."""
    first = made_rank(made_records(1, 9), made_report(0, **report), now=NOW)
    memory = look(first, made_rank(made_records(1, 9), made_report(1), now=NOW))
    assert words in memory.findings[FindingKind.BLIND, -1].sentence


def test_what_a_release_may_lack_is_not_missed():
    """The exporter's tables say which hooks those are."""
    optional = {
        point.name for table in (V1_POINTS, V2_HANDLER_POINTS, V2_MODULE_POINTS) for point in table if point.optional
    }
    assert optional == OPTIONAL_HOOKS
    on = HookReport(hook="_update_states", state=HookState.ON)
    hooks = [on, *(HookReport(hook=name, state=HookState.ABSENT) for name in sorted(optional))]
    assert kinds(look(*two(made_records(1, 9), made_records(1, 9), hooks=hooks))) == set()


def test_unknown_code_without_speculation_is_nothing_to_worry_about():
    """Nothing can drift there."""
    ranks = [
        made_rank(made_records(1, 9), made_report(pp, trim=MitigationState.UNKNOWN_CODE, spec_tokens=0), now=NOW)
        for pp in (0, 1)
    ]
    assert kinds(look(*ranks)) == set()


def test_a_rank_that_no_exporter_speaks_of_is_missed_after_a_while():
    """Ranks come up one after the other; then a node is missing in the configuration."""
    alone = made_rank(made_records(1, 9), made_report(0), now=NOW, first_seen=NOW.monotonic - 5)
    assert kinds(look(alone)) == set()
    alone = made_rank(made_records(1, 9), made_report(0), now=NOW, first_seen=NOW.monotonic - 60)
    assert "1 of the engine's ranks are not seen" in look(alone).findings[FindingKind.BLIND, -1].sentence


def test_an_exporter_that_never_answered_is_out_of_reach():
    """Never is said as never."""
    rank = made_rank(made_records(1, 9), made_report(0), now=NOW, first_seen=NOW.monotonic)
    memory = look(rank, answered=math.inf)
    assert "never answered" in memory.findings[FindingKind.BLIND, -1].sentence


def test_an_engine_that_was_fixed_counts_as_healthy_again():
    """The finding stays; the state is what the engine is like now."""
    memory = look(*two(made_records(1, 20, lambda s: {"masked": 2} if s == 9 else {}), made_records(1, 20)))
    ranks = two(made_records(1, 60), made_records(1, 60), trim=MitigationState.APPLIED)
    memory = look(*ranks, memory=memory)
    assert engine_state(made_engine(*ranks, now=NOW), memory) is State.OUTPUT_WRONG
    ranks = two(made_records(1, 90), made_records(1, 90), trim=MitigationState.APPLIED)
    memory = look(*ranks, memory=memory)
    assert engine_state(made_engine(*ranks, now=NOW), memory) is State.HEALTHY
    assert kinds(memory) == {FindingKind.MASK_DISAGREEMENT}
