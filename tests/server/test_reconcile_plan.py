"""Which command an engine still lacks."""

from made_ranks import START_UNIX, ManualClock, made_control, made_engine, made_rank, made_records, made_report

from rankscope_exporter.contract import MitigationState, RankLife
from rankscope_server.control.reconcile import plan_reconcile, wanted_of
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.store import DesiredRow

NOW = ManualClock().now()
ON = DesiredRow("chat", "", True, 5, "ada", START_UNIX)


def engine(*controls, last=0, trim=MitigationState.AVAILABLE, **facts):
    controls = controls or (None, None)
    ranks = [
        made_rank(made_records(1, last), made_report(pp, control=control, trim=trim), now=NOW)
        for pp, control in enumerate(controls)
    ]
    return made_engine(*ranks, now=NOW, **facts)


def plan(facts, wanted=ON):
    return plan_reconcile(facts, wanted, EngineMemory(), 20.0, NOW)


def test_an_engine_that_came_up_anew_is_told_at_once():
    """Before its first step."""
    step = plan(engine())
    assert (step.send, step.anew, step.effective_step, step.reason) == (True, False, 0, "came up anew")


def test_an_engine_that_runs_already_is_told_for_a_step_ahead():
    """All ranks act at the same step."""
    assert plan(engine(last=50)).effective_step > 50


def test_an_engine_that_was_told_is_left_alone():
    """Also while it has not acted yet."""
    assert not plan(engine(made_control(5, 4), made_control(5))).send


def test_an_engine_that_is_as_wanted_from_the_start_is_left_alone():
    """VLLM was started with the fix on."""
    assert not plan(engine(trim=MitigationState.APPLIED)).send
    assert not plan(engine(), DesiredRow("chat", "", False, 5, "ada", START_UNIX)).send


def test_ranks_that_a_command_did_not_reach_get_it_while_there_is_time():
    """The same command, for the same step."""
    step = plan(engine(made_control(5, 4, effective_step=90), made_control(4), last=50))
    assert (step.send, step.anew, step.effective_step) == (True, False, 90)


def test_a_command_whose_step_has_passed_is_given_anew_to_all():
    """Otherwise ranks would act at different steps."""
    step = plan(engine(made_control(5, effective_step=40), made_control(4), last=50))
    assert (step.send, step.anew) == (True, True)
    assert step.effective_step > 50


def test_nothing_is_sent_that_cannot_work():
    """Out of reach, unknown code, ended: the next tick looks again."""
    assert not plan(engine(error="connection refused")).send
    assert not plan(engine(trim=MitigationState.UNKNOWN_CODE)).send
    gone = [made_rank(made_records(1, 0), made_report(pp, life=RankLife.GONE), now=NOW) for pp in (0, 1)]
    assert not plan(made_engine(*gone, now=NOW)).send


def test_nothing_is_sent_that_nobody_asked_for():
    """Without a toggle the engine stays as it is; another server's newer command stands."""
    assert not plan(engine(), None).send
    assert not plan(engine(made_control(9), made_control(9))).send


def test_what_was_said_of_an_engine_goes_before_what_was_said_of_its_deployment():
    """And counts for that engine only."""
    own = DesiredRow("chat", "e1", False, 6, "ada", START_UNIX)
    assert wanted_of([ON, own], "chat", "e1") is own
    assert wanted_of([ON, own], "chat", "e2") is ON
    assert wanted_of([ON, own], "other", "e1") is None
