"""Ranks that end: which of them are lost to the others, and which were shut down."""

import dataclasses

import numpy as np
from made_ranks import ManualClock, made_engine, made_rank, made_record, made_records, made_report

from rankscope_exporter.contract import Phase, RankLife, StepFailure
from rankscope_server.domain.clock import Moment, NodeClock
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.model import FindingKind

NOW = ManualClock().now()
IDLE = made_records(1, 30)
BUSY = np.concatenate([made_records(1, 30), made_record(31, Phase.STATE_UPDATED)])


def rank(pp, records, life=RankLife.RUNNING, *, since=0.0, now=NOW, **report):
    """A rank whose life has been so for `since` seconds."""
    made = made_report(pp, life=life, **report)
    return made_rank(records, made, now=now, first_seen=500, life_since=now.monotonic - since)


def lost(*ranks, memory=None, now=NOW):
    memory = assess(made_engine(*ranks, now=now), memory or EngineMemory(), now)
    return memory.findings.get((FindingKind.RANK_LOST, 0))


def test_a_rank_that_ends_while_its_peers_wait_is_lost_at_once():
    """One look at it is enough: nothing that a peer has begun can end any more."""
    finding = lost(rank(0, IDLE, RankLife.GONE), rank(1, BUSY))
    assert finding.sentence == "pp0 is gone (pid 4000) at step 30; pp1 waits for it"
    assert finding.step == 30


def test_a_rank_that_ends_within_a_step_is_lost_at_once():
    """Its record says so, whatever the others do."""
    assert lost(rank(0, BUSY, RankLife.GONE), rank(1, IDLE)).step == 31


def test_a_rank_that_ends_is_no_wedge_because_masks_differed():
    """Ranks whose masks differ go on; what the peer of a lost process waits for is that process."""
    masked = made_records(1, 30, lambda step: {"masked": 3, "mask_hash": 7} if step > 28 else {})
    ranks = [
        made_rank(np.concatenate([masked, made_record(31, Phase.STATE_UPDATED)]), made_report(0, life=RankLife.GONE), now=NOW, quiet=60, first_seen=500),
        made_rank(np.concatenate([IDLE, made_record(31, Phase.DECIDED)]), made_report(1), now=NOW, quiet=60, first_seen=500),
    ]  # fmt: skip
    memory = assess(made_engine(*ranks, now=NOW), EngineMemory(), NOW)
    assert {kind for kind, _ in memory.findings} == {FindingKind.MASK_DISAGREEMENT, FindingKind.RANK_LOST}


def test_processes_that_end_one_after_the_other_while_idle_were_shut_down():
    """Neither the first nor the last of them is lost; the engine has ended."""
    assert lost(rank(0, IDLE, RankLife.GONE), rank(1, IDLE)) is None
    assert lost(rank(0, IDLE, RankLife.GONE, since=4), rank(1, IDLE)) is None
    assert lost(rank(0, IDLE, RankLife.GONE, since=5), rank(1, IDLE, RankLife.GONE, since=1)) is None
    assert lost(rank(0, IDLE, RankLife.GONE, since=500), rank(1, IDLE, RankLife.GONE, since=500)) is None


def test_a_process_that_ends_alone_is_lost():
    """A shutdown does not take that long: the next request would hang."""
    assert lost(rank(0, IDLE, RankLife.GONE, since=11), rank(1, IDLE)) is not None


def test_all_processes_gone_within_a_step_are_lost():
    """The engine did not end in good order."""
    finding = lost(rank(0, BUSY, RankLife.GONE, since=5), rank(1, BUSY, RankLife.GONE, since=5))
    assert finding.sentence == "every process of the engine is gone; the last step was 31: start vLLM again"


def test_a_peer_that_is_not_reached_is_not_known_to_wait():
    """What its exporter said last is older than the end of the other: it may be shut down as well by now."""
    later = Moment(NOW.unix + 15, NOW.monotonic + 15)
    peer = rank(1, BUSY)
    gone = rank(0, IDLE, RankLife.GONE, since=12, now=later)
    assert lost(gone, peer, now=later) is None
    clock = NodeClock(peer.clock.monotonic_ns, peer.clock.unix, later.monotonic)
    assert lost(gone, dataclasses.replace(peer, clock=clock), now=later) is not None


def test_records_from_before_the_end_prove_nothing():
    """A report told first that the processes are gone; what they did last has not come yet."""
    later = Moment(NOW.unix + 5, NOW.monotonic + 5)
    old = [rank(pp, BUSY, RankLife.GONE, since=-4) for pp in (0, 1)]
    assert lost(*old, now=later) is None
    ended = made_record(31)
    for one in old:
        one.history.absorb(ended)
    fresh = [
        dataclasses.replace(one, clock=NodeClock(one.clock.monotonic_ns, one.clock.unix, later.monotonic))
        for one in old
    ]
    assert lost(*fresh, now=later) is None


def test_a_stopped_process_counts_once_it_lasts():
    """Debuggers stop one for a moment; of what an exporter said last before it went silent one does not know that it lasts."""
    assert lost(rank(0, BUSY, RankLife.STOPPED, since=1), rank(1, BUSY)) is None
    assert lost(rank(0, BUSY, RankLife.STOPPED, since=3), rank(1, BUSY)) is not None
    later = Moment(NOW.unix + 9, NOW.monotonic + 9)
    assert lost(rank(0, BUSY, RankLife.STOPPED, since=1), rank(1, BUSY), now=later) is None


def test_the_step_is_that_of_the_failure():
    """The report may know of a later step than the records that have come."""
    told = StepFailure(step=68, phase=Phase.DECIDED, method="sample_tokens", kind="ValueError")
    assert lost(rank(0, IDLE), rank(1, IDLE, failure=told, step=68)).step == 68
    assert lost(rank(0, IDLE, RankLife.GONE, step=44), rank(1, BUSY)).step == 44
