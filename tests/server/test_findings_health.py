"""What good health can look like, one false alarm that was thought of at a time."""

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
)

from rankscope_exporter.contract import ControlOutcome, HookReport, HookState, MitigationState, Phase, RankLife
from rankscope_server.domain.clock import Moment, NodeClock
from rankscope_server.domain.facts import EngineFacts, ExporterFacts
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.model import FindingKind

NOW = ManualClock().now()
APPLIED = MitigationState.APPLIED


def at(seconds):
    return Moment(NOW.unix + seconds, NOW.monotonic + seconds)


def look(*ranks, memory=None, now=NOW, **engine):
    return assess(made_engine(*ranks, now=now, **engine), memory or EngineMemory(), now)


def kinds(memory):
    return {finding.kind for finding in memory.all_findings if finding.open}


def ranks_of(first, second, *, quiet=0.0, now=NOW, **report):
    return [
        made_rank(records, made_report(pp, **report), now=now, quiet=quiet)
        for pp, records in enumerate([first, second])
    ]


def answered(rank, seconds, *, exporter=None, jump=0.0):
    """The rank as its exporter showed it so many seconds after `NOW`, with its wall clock set forward by `jump`."""
    clock = NodeClock(
        rank.clock.monotonic_ns + int(seconds * 1e9), rank.clock.unix + seconds + jump, at(seconds).monotonic
    )
    return dataclasses.replace(rank, clock=clock, exporter=exporter or rank.exporter, reported=at(seconds).monotonic)


def nodes(first, second, *, silent, now):
    """An engine on two nodes, of which the first one's exporter fails."""
    exporters = (
        ExporterFacts("http://a:9610", silent, "timed out", True, True, 0.0),
        ExporterFacts("http://b:9610", now.monotonic, "", True, True, 0.0),
    )
    return EngineFacts("chat", "e1", (first, second), exporters)


def in_step(last):
    return np.concatenate([made_records(1, last - 1), made_record(last, Phase.STATE_UPDATED)])


def test_an_exporter_that_lags_makes_no_stall():
    """One rank was idle when it was last seen; that the other has been in a step since says nothing about both."""
    idle = answered(ranks_of(made_records(1, 71), in_step(72), quiet=11)[0], 0)
    busy = answered(made_rank(in_step(72), made_report(1), now=NOW), 10.5, exporter="http://b:9610")
    memory = assess(nodes(idle, busy, silent=NOW.monotonic + 8, now=at(10.5)), EngineMemory(), at(10.5))
    assert kinds(memory) == set()


def test_ranks_that_are_reached_show_a_stall_of_all():
    """Ranks move together: a node that is gone does not hide that the others wait."""
    away = made_rank(in_step(72), made_report(0), now=NOW)
    busy = answered(made_rank(in_step(72), made_report(1), now=NOW), 20, exporter="http://b:9610")
    memory = assess(nodes(away, busy, silent=NOW.monotonic, now=at(20)), EngineMemory(), at(20))
    assert kinds(memory) == {FindingKind.STALLED, FindingKind.BLIND}


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_a_wall_clock_that_is_set_is_no_finding(jump):
    """Ages and limits go by monotonic clocks."""
    ranks = ranks_of(made_records(1, 50), in_step(51), started_unix=NOW.unix - 60)
    memory = look(*ranks)
    ranks = [answered(ranks[0], 1, jump=jump), answered(ranks[1], 1)]
    memory = look(*ranks, memory=memory, now=at(1))
    assert kinds(memory) == set()
    assert len(memory.seen) == 2, "and no rank is left out of what is compared"


@pytest.mark.parametrize("jump", [-7200.0, -59.5, 7200.0])
def test_a_wall_clock_that_is_set_hides_no_lost_rank(jump):
    """By the clock of its node, its peer has begun after the rank had ended."""
    dead, peer = ranks_of(made_records(1, 50), in_step(51), started_unix=NOW.unix - 60)
    memory = look(dead, peer)
    gone = made_report(0, life=RankLife.GONE, started_unix=NOW.unix - 60)
    dead = dataclasses.replace(answered(dead, 1), report=gone, life_since=at(1).monotonic)
    assert kinds(look(dead, answered(peer, 1, jump=jump), memory=memory, now=at(1))) == {FindingKind.RANK_LOST}
    assert kinds(look(dead, answered(peer, 1, jump=jump), now=at(1))) == {FindingKind.RANK_LOST}


def test_a_long_step_after_masks_agreed_again_is_no_wedge():
    """What was wrong long ago, and is mended, makes no pause of three seconds critical."""
    memory = look(*ranks_of(made_records(1, 20, lambda s: {"masked": 2} if s == 9 else {}), made_records(1, 20)))
    memory = look(*ranks_of(in_step(100), in_step(100), quiet=4), memory=memory)
    assert kinds(memory) == {FindingKind.MASK_DISAGREEMENT}
    memory = look(*ranks_of(in_step(100), in_step(100), quiet=15), memory=memory)
    assert memory.findings[FindingKind.STALLED, 0].sentence.endswith("; ranks that differed before agree since")


def test_ranks_whose_masks_differ_wedge():
    """The guard of the last step may never have been seen."""
    masked = made_records(1, 99, lambda s: {"masked": 2} if s > 90 else {})
    memory = look(*ranks_of(np.concatenate([masked, made_record(100, Phase.SCHEDULED)]), in_step(100), quiet=4))
    assert FindingKind.WEDGED in kinds(memory)


def test_warm_up_is_told_by_the_earliest_step_in_flight():
    """One rank compiles in step 8 while the other has begun step 9 already."""
    assert kinds(look(*ranks_of(in_step(9), in_step(8), quiet=30))) == set()
    assert kinds(look(*ranks_of(in_step(10), in_step(9), quiet=30))) == {FindingKind.STALLED}


def test_a_step_hook_that_failed_on_one_rank_makes_no_batch_mismatch():
    """It left a step out of its hash, which is a fault of ours."""
    hooks = [HookReport(hook="execute_model", state=HookState.ON, faults={"KeyError": 1})]
    other = made_records(1, 20, lambda s: {"batch_hash": 5 if s >= 14 else 77 + s})
    faulty = made_rank(other, made_report(1, hooks=hooks, faults=1), now=NOW)
    assert kinds(look(ranks_of(made_records(1, 20), other)[0], faulty)) == set()


def test_two_moments_of_drift_with_lost_records_between_are_none():
    """Steps next to each other among those that are held need not be neighbours."""
    drifting = {"drift_max": 3, "drifting": 1}
    held = np.concatenate([made_records(1, 12, lambda s: drifting if s == 12 else {}), made_record(600, **drifting)])
    assert kinds(look(*ranks_of(held, made_records(1, 600)))) == set()


def test_reports_of_a_toggle_that_were_read_at_different_moments_are_no_mixture():
    """One exporter was asked after the toggle and the other before it had even been told."""
    on = made_rank(made_records(1, 9), made_report(0, trim=APPLIED, control=made_control(3)), now=NOW)
    off = made_rank(made_records(1, 9), made_report(1), now=NOW)
    memory = look(on, off)
    assert kinds(memory) == set()
    memory = look(answered(on, 5), off, memory=memory, now=at(5))
    assert kinds(memory) == set(), "the second exporter has not been heard of since"
    memory = look(answered(on, 5), answered(off, 5), memory=memory, now=at(5))
    assert kinds(memory) == {FindingKind.MITIGATION_MIXED}
    assert kinds(look(answered(on, 6), answered(off, 6), memory=memory, now=at(6))) == {FindingKind.MITIGATION_MIXED}
    done = made_rank(made_records(1, 9), made_report(1, trim=APPLIED, control=made_control(3)), now=at(7))
    assert kinds(look(answered(on, 7), done, memory=memory, now=at(7))) == set()


def test_a_mixture_is_told_by_the_first_step_that_shows_it():
    """The newest step only tells that it goes on."""
    control = made_control(3, outcome=ControlOutcome.PENDING)
    on = made_rank(
        made_records(1, 40, lambda s: {"mitigation": APPLIED} if s >= 31 else {}),
        made_report(0, trim=APPLIED, control=control),
        now=NOW,
    )
    finding = look(on, made_rank(made_records(1, 37), made_report(1), now=NOW)).findings[
        FindingKind.MITIGATION_MIXED, 0
    ]
    assert finding.step == 31


def restarted(pp, records, *, started, now):
    """A rank of a process that was started so many seconds before `now`."""
    report = made_report(pp, started_unix=now.unix - started, key=f"new-pp{pp}", pid=9000 + pp)
    rank = made_rank(records, report, now=now, first_seen=now.monotonic)
    return dataclasses.replace(rank, clock=NodeClock(rank.clock.monotonic_ns, now.unix, now.monotonic))


def test_an_engine_that_is_started_anew_under_its_old_name_is_not_compared_with_what_it_was():
    """One node shows the new process while the other still shows what is left of the old one."""
    old = answered(made_rank(made_records(1, 300), made_report(1, life=RankLife.GONE), now=NOW), 30)
    new = restarted(0, made_records(1, 5, lambda s: {"batch_hash": s}), started=20, now=at(30))
    old = dataclasses.replace(old, clock=dataclasses.replace(old.clock, unix=at(30).unix))
    assert kinds(look(new, old, now=at(30))) == set()


def test_a_disagreement_ends_with_the_processes_that_had_it():
    """An engine that is started anew under its old name has none, and remembers that there was one."""
    memory = look(*ranks_of(made_records(1, 20, lambda s: {"masked": 2} if s == 9 else {}), made_records(1, 20)))
    new = [restarted(pp, made_records(1, 5), started=20, now=at(60)) for pp in (0, 1)]
    memory = look(*new, memory=memory, now=at(60))
    assert kinds(memory) == set()
    assert [finding.kind for finding in memory.closed] == [FindingKind.MASK_DISAGREEMENT]


def test_a_rank_that_catches_up_is_compared_with_all_that_its_peers_did():
    """Its exporter was away for a thousand steps; what it shows then is looked at, however long ago it was."""
    first, second = ranks_of(made_records(1, 10), made_records(1, 10))
    memory = look(first, second)
    first.history.absorb(made_records(11, 1000))
    memory = look(first, second, memory=memory)
    second.history.absorb(made_records(11, 1000, lambda s: {"masked": 3} if s == 40 else {}))
    memory = look(first, second, memory=memory)
    assert memory.findings[FindingKind.MASK_DISAGREEMENT, 0].step == 40


def test_steps_of_an_engine_that_has_run_for_hours_are_compared_from_where_they_begin():
    """Their hashes go back to the first step, of which nothing is held any more."""
    first, second = ranks_of(made_records(90_000, 90_400), made_records(90_100, 90_398))
    assert kinds(look(first, second)) == set()
