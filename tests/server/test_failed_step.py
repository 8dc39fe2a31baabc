"""A step that an error of vLLM ended: the rank is lost, though its process lives."""

import numpy as np
import pytest
from made_ranks import (
    START_UNIX,
    ManualClock,
    begin_ns,
    made_engine,
    made_rank,
    made_record,
    made_records,
    made_report,
    made_v2_record,
    made_v2_records,
    made_v2_report,
)

from rankscope_exporter.contract import Phase, RankLife, Role, StepFailure
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.history import StepHistory
from rankscope_server.domain.model import FindingKind, Severity, State
from rankscope_server.domain.state import engine_headline, engine_state
from rankscope_server.domain.toggle import refuse_delivery
from rankscope_server.domain.words import last_did

NOW = ManualClock().now()
TOLD = StepFailure(step=34, phase=Phase.STATE_UPDATED, method="sample_tokens", kind="AssertionError")
SENTENCE = "pp1 failed in step 34, in sample_tokens after the state was updated: AssertionError"


def engine(failure=TOLD, *, later=0, quiet=0.5, failed=1, **report):
    """The last rank fails in step 34 and its peer waits; or it has begun so many steps since."""
    first = np.concatenate([made_v2_records(1, 33), made_v2_record(34, Phase.DECIDED)])
    broken = made_v2_record(34, Phase.STATE_UPDATED, role=Role.SENDER, failed=failed)
    since = [made_v2_record(34 + n, role=Role.SENDER) for n in range(1, later + 1)]
    second = np.concatenate([made_v2_records(1, 33, role=Role.SENDER), broken, *since])
    return made_engine(
        made_rank(first, made_v2_report(0, step=34), now=NOW, quiet=quiet),
        made_rank(second, made_v2_report(1, step=34 + later, failure=failure, **report), now=NOW, quiet=quiet),
        now=NOW,
    )


def open_kinds(memory):
    return {finding.kind for finding in memory.all_findings if finding.open}


def test_a_failed_step_is_a_lost_rank_with_step_and_phase():
    """Critical at once, in words that name the method and the error's class."""
    facts = engine()
    memory = assess(facts, EngineMemory(), NOW)
    finding = memory.findings[FindingKind.RANK_LOST, 0]
    assert (finding.step, finding.severity) == (34, Severity.CRITICAL)
    assert finding.sentence == f"{SENTENCE}; its peers wait"
    assert [rank.pp_rank for rank in finding.ranks] == [1]
    assert finding.since_unix == pytest.approx(START_UNIX + begin_ns(34) / 1e9)
    assert engine_state(facts, memory) is State.RANK_LOST
    assert engine_headline(facts, memory, NOW) == finding.sentence


def test_the_record_alone_is_enough():
    """Step records come before the report that says how it came about."""
    memory = assess(engine(failure=None), EngineMemory(), NOW)
    assert memory.findings[FindingKind.RANK_LOST, 0].sentence == (
        "pp1 failed in step 34, after the state was updated; its peers wait"
    )


def test_the_report_alone_is_enough():
    """The record may have been fetched just before the error came."""
    assert open_kinds(assess(engine(failed=0), EngineMemory(), NOW)) == {FindingKind.RANK_LOST}


def test_a_rank_that_went_on_is_not_lost():
    """It is over once the rank has begun a later step, and then it is told as closed."""
    memory = assess(engine(), EngineMemory(), NOW)
    memory = assess(engine(later=2), memory, NOW)
    assert open_kinds(memory) == set()
    assert [finding.kind for finding in memory.closed] == [FindingKind.RANK_LOST]


def test_a_lost_rank_is_no_stall():
    """Its peers stand still because of it."""
    assert open_kinds(assess(engine(quiet=120), EngineMemory(), NOW)) == {FindingKind.RANK_LOST}


def test_a_rank_whose_life_is_unknown_is_lost_by_its_failure():
    """What its record says holds whether or not its process can be seen."""
    memory = assess(engine(life=RankLife.UNKNOWN), EngineMemory(), NOW)
    assert FindingKind.RANK_LOST in open_kinds(memory)


def test_the_failure_is_still_told_when_the_processes_are_gone():
    """An error makes vLLM end itself: why is what one wants to know then."""
    ranks = engine(life=RankLife.GONE).ranks
    assert assess(made_engine(*ranks, now=NOW), EngineMemory(), NOW).findings[FindingKind.RANK_LOST, 0].sentence == (
        f"{SENTENCE}, and is gone (pid 4001); its peers wait"
    )
    first = made_rank(ranks[0].history.tail(99), made_v2_report(0, life=RankLife.GONE), now=NOW)
    facts = made_engine(first, ranks[1], now=NOW)
    assert assess(facts, EngineMemory(), NOW).findings[FindingKind.RANK_LOST, 0].sentence == (
        f"{SENTENCE}, and is gone (pid 4001); every process of the engine is gone; the last step was 34: start vLLM again"
    )


def test_what_it_did_last_is_the_failure():
    """On its card, too; and the step is not called in flight any more."""
    rank = engine().ranks[1]
    assert last_did(rank, (), NOW) == SENTENCE.removeprefix("pp1 ")
    assert rank.in_flight_seconds(NOW) is None
    assert last_did(engine(life=RankLife.GONE).ranks[1], (), NOW).endswith("AssertionError; then its process ended")


def test_no_toggle_for_an_engine_with_a_failed_rank():
    """It takes no further step, so it would never act."""
    failed = StepFailure(step=9, phase=Phase.DECIDED, method="unknown", kind="unknown")
    ranks = [
        made_rank(made_records(1, 9), made_report(0, step=9), now=NOW),
        made_rank(
            np.concatenate([made_records(1, 8), made_record(9, Phase.DECIDED, failed=1)]),
            made_report(1, step=9, failure=failed),
            now=NOW,
        ),
    ]
    facts = made_engine(*ranks, now=NOW)
    memory = assess(facts, EngineMemory(), NOW)
    assert memory.findings[FindingKind.RANK_LOST, 0].sentence == (
        "pp1 failed in step 9, after the guard had decided; its peers wait"
    )
    assert "failed in step 9 and takes no further one: restart vLLM" in refuse_delivery(facts, memory, NOW)


def test_a_record_that_fails_later_takes_the_place_of_what_was_held():
    """The phase stays where it was; the mark is new."""
    history = StepHistory(capacity=64)
    history.absorb(made_record(5, Phase.DECIDED))
    assert len(history.absorb(made_record(5, Phase.DECIDED, failed=1))) == 1
    assert int(history.newest()["failed"]) == 1
    assert len(history.absorb(made_record(5, Phase.DECIDED))) == 0
