"""Whether the trim fix can be toggled, and what is told before."""

import numpy as np
import pytest
from made_ranks import ManualClock, made_control, made_engine, made_rank, made_record, made_records, made_report

from rankscope_exporter.contract import ControlOutcome, MitigationState, Phase, RankLife
from rankscope_exporter.flight.layout import MAX_GENERATION
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.fix import build_progress
from rankscope_server.domain.toggle import effective_step, next_generation, plan_toggle

NOW = ManualClock().now()


def engine(*, quiet=0.0, last=100, first=None, second=None, **facts):
    ranks = [
        made_rank(made_records(max(1, last - 20), last), made_report(pp, **(other or {})), now=NOW, quiet=quiet)
        for pp, other in ((0, first), (1, second))
    ]
    return made_engine(*ranks, now=NOW, **facts)


def plan(facts, *, desired=True, rate=20.0, memory=None):
    return plan_toggle(
        "chat",
        [facts],
        memories={facts.engine: memory or EngineMemory()},
        rates={facts.engine: rate},
        now=NOW,
        desired=desired,
    )


def test_a_healthy_engine_can_be_toggled():
    """The confirmation says which ranks act, when, and what it cannot do."""
    made = plan(engine())
    assert made.refusal == ""
    assert made.ranks == ("pp0", "pp1")
    assert made.effective_step == 118
    assert made.timing == "Every rank acts at about step 118, in about 1 s; all at the same step."
    assert any("does not revive" in limit for limit in made.limits)


@pytest.mark.parametrize(("rate", "step"), [(None, 116), (1.0, 116), (20.0, 118), (400.0, 403)])
def test_the_margin_follows_the_step_rate(rate, step):
    """At least 16 steps, and as many as pass while the command is on its way."""
    assert effective_step(engine(), rate, NOW) == step


def test_old_data_widen_the_margin():
    """What is known of the newest step is behind by the age of the data."""
    assert effective_step(engine(answered=NOW.monotonic - 1.0), 100.0, NOW) == 100 + 175 + 3


def test_an_idle_engine_acts_at_its_next_step():
    """Nothing happens before it; an engine without a step yet acts at once."""
    assert effective_step(engine(quiet=30), 20.0, NOW) == 101
    fresh = [made_rank(made_records(1, 0), made_report(pp), now=NOW) for pp in (0, 1)]
    assert effective_step(made_engine(*fresh, now=NOW), None, NOW) == 0
    made = plan(engine(quiet=30))
    assert made.effective_step is None
    assert made.timing == "The ranks take no steps at present: every rank acts at its next one."


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            engine(second={"trim": MitigationState.UNKNOWN_CODE, "trim_reason": "decorated"}),
            "pp1 does not know the code that vLLM has loaded: decorated",
        ),
        (engine(first={"trim": MitigationState.NOT_APPLICABLE}), "pp0 has nothing to fix"),
        (engine(second={"life": RankLife.STOPPED}), "pp1 is stopped"),
        (engine(first={"life": RankLife.GONE}, second={"life": RankLife.GONE}), "has ended"),
        (engine(control=False), "takes no commands: start it with RANKSCOPE_CONTROL_TOKEN_FILE"),
        (engine(token=False), "no token for deployment chat: set control_token_file"),
        (engine(error="connection refused"), "cannot be reached: connection refused"),
        (engine(answered=NOW.monotonic - 20), "cannot be reached"),
        (engine(first={"pp_size": 3}, second={"pp_size": 3}), "1 of its ranks are not seen"),
        (
            engine(first={"trim": MitigationState.APPLIED}, second={"trim": MitigationState.APPLIED}),
            "is on already on every rank",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(facts, words):
    """Up front, before anything is sent."""
    assert words in plan(facts).refusal


def test_a_wedged_engine_is_refused():
    """No rank takes another step, so none would act."""
    first = np.concatenate(
        [made_records(1, 72, lambda s: {"masked": 8} if s == 72 else {}), made_record(73, Phase.STATE_UPDATED)]
    )
    second = np.concatenate([made_records(1, 71), made_record(72, Phase.DECIDED)])
    facts = made_engine(
        *[made_rank(r, made_report(pp), now=NOW, quiet=9) for pp, r in enumerate((first, second))], now=NOW
    )
    assert "wedged" in plan(facts, memory=assess(facts, EngineMemory(), NOW)).refusal


def test_a_deployment_concerns_only_the_engines_that_are_not_as_wanted():
    """One that has the fix already is left alone."""
    other = made_engine(
        *[
            made_rank(made_records(1, 9), made_report(pp, engine="e2", trim=MitigationState.APPLIED), now=NOW)
            for pp in (0, 1)
        ],
        now=NOW,
    )
    facts = engine()
    made = plan_toggle(
        "chat", [facts, other], memories={"e1": EngineMemory(), "e2": EngineMemory()}, rates={}, now=NOW, desired=True
    )
    assert (made.engines, made.refusal) == (("e1",), "")


def test_a_deployment_without_engines_is_refused():
    """There is nothing to turn on."""
    assert "no engine of chat is known" in plan_toggle("chat", [], memories={}, rates={}, now=NOW, desired=True).refusal


def test_generations_only_go_up():
    """Above what is stored, and above what a rank has seen from elsewhere."""
    facts = engine(first={"control": made_control(7)})
    assert next_generation(3, [facts]) == 8
    assert next_generation(30, [facts]) == 31
    with pytest.raises(ValueError, match="does not fit the control word"):
        next_generation(MAX_GENERATION, [])


def test_progress_is_told_per_rank():
    """Pending with the step, applied with the step, and how far apart they acted."""
    done = made_control(3, effective_step=118, acted_step=118)
    waiting = made_control(3, 3, effective_step=118, outcome=ControlOutcome.PENDING)
    progress = build_progress(engine(first={"control": done}, second={"control": waiting}))
    assert progress.per_rank == (("pp0", "applied at step 118"), ("pp1", "pending, acts at step 118"))
    assert (progress.acknowledged, progress.ranks, progress.applied_step_spread) == (1, 2, None)
    late = made_control(3, effective_step=118, acted_step=121, outcome=ControlOutcome.APPLIED_LATE)
    progress = build_progress(engine(first={"control": done}, second={"control": late}))
    assert progress.per_rank[1] == ("pp1", "applied late, at step 121 (asked for step 118)")
    assert progress.applied_step_spread == 3
    assert build_progress(engine()) is None
