"""
Arrivals and scheduling of the simulation.
"""

import itertools
from dataclasses import replace

import pytest

from rankscope_exporter.simulation.scheduler import CHUNK_TOKENS, Scheduler
from rankscope_exporter.simulation.spec import Workload
from rankscope_exporter.simulation.traffic import HOLDING_INTERVAL, Arrival, Traffic

BUSY = Workload(hold_seconds=20.0, lull_seconds=20.0)


def test_same_seed_same_traffic() -> None:
    """Two runs with the same seed see the same arrivals, another seed sees others."""
    one, two, other = Traffic(BUSY), Traffic(BUSY), Traffic(replace(BUSY, seed=2))
    arrivals = [one.tick() for _ in range(900)]
    assert arrivals == [two.tick() for _ in range(900)]
    assert arrivals != [other.tick() for _ in range(900)]


@pytest.mark.parametrize("rate", [20.0, 50.0, 7.0])
def test_busy_traffic_is_steady_and_then_quiet(rate: float) -> None:
    """While traffic is busy no gap is longer than what holds an engine open; in a lull gaps are about a second."""
    traffic = Traffic(replace(BUSY, steps_per_second=rate))
    ticks = [bool(traffic.tick()) for _ in range(int(40 * rate))]
    busy, quiet = ticks[: int(20 * rate)], ticks[int(20 * rate) :]
    arrivals = [tick for tick, arrived in enumerate(busy) if arrived]
    assert busy[0]
    assert max(b - a for a, b in itertools.pairwise(arrivals)) <= HOLDING_INTERVAL
    assert 15 <= sum(quiet) <= 22


def test_traffic_without_a_busy_time_still_comes() -> None:
    """A hold of zero seconds means a lull from the start, whose first request comes at once."""
    traffic = Traffic(replace(BUSY, hold_seconds=0.0, lull_seconds=0.0))
    assert traffic.tick()
    assert sum(bool(traffic.tick()) for _ in range(200)) == 10


def test_lengths_are_planned_before_the_verdict_and_corrected_by_it() -> None:
    """A step counts on all drafts of the one before, and the verdict takes off what was rejected."""
    scheduler = Scheduler(slots=4, draft_tokens=3)
    scheduler.add([Arrival("r", 10, 50, 1)])
    prompt, first, second = (scheduler.schedule() for _ in range(3))
    assert prompt is not None
    assert first is not None
    assert second is not None
    assert prompt.num_scheduled_tokens == {"r": 10}
    assert [new.req_id for new in prompt.scheduled_new_reqs] == ["r"]
    assert (first.num_scheduled_tokens, first.scheduled_cached_reqs.num_output_tokens) == ({"r": 4}, [1])
    assert (second.scheduled_cached_reqs.num_computed_tokens, second.scheduled_cached_reqs.num_output_tokens) == (
        [14],
        [5],
    )
    scheduler.update(prompt, {"r": 1})
    scheduler.update(first, {"r": 2})
    scheduler.update(second, {"r": 4})
    third = scheduler.schedule()
    assert third is not None
    assert third.scheduled_cached_reqs.num_output_tokens == [7]
    assert third.scheduled_cached_reqs.num_computed_tokens == [16]


def test_long_prompts_are_read_in_chunks() -> None:
    """A prompt beyond a step's share is read in several steps, without drafts and without counting on a token."""
    scheduler = Scheduler(slots=4, draft_tokens=3)
    scheduler.add([Arrival("r", CHUNK_TOKENS + 100, 20, 1)])
    chunk, rest, decode = (scheduler.schedule() for _ in range(3))
    assert chunk is not None
    assert rest is not None
    assert decode is not None
    assert [plan.num_scheduled_tokens["r"] for plan in (chunk, rest, decode)] == [CHUNK_TOKENS, 100, 4]
    assert rest.scheduled_cached_reqs.num_output_tokens == [0]
    assert not rest.scheduled_spec_decode_tokens


def test_finished_requests_are_told_to_the_ranks_and_late_results_ignored() -> None:
    """A request that has its tokens leaves the next plan, which names it, even if another step of it is in flight."""
    scheduler = Scheduler(slots=1, draft_tokens=0)
    scheduler.add([Arrival("r", 10, 1, 1), Arrival("s", 10, 5, 1)])
    first, ahead = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert ahead is not None
    scheduler.update(first, {"r": 1})
    scheduler.update(ahead, {"r": 1})
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.finished_req_ids == {"r"}
    assert [new.req_id for new in plan.scheduled_new_reqs] == ["s"]
    assert scheduler.completed == 1


def test_nothing_to_do_is_no_step() -> None:
    """An idle engine plans no step; the last finished request still makes one, with nothing scheduled."""
    scheduler = Scheduler(slots=1, draft_tokens=0)
    assert scheduler.schedule() is None
    scheduler.add([Arrival("r", 10, 1, 1)])
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, {"r": 1})
    goodbye = scheduler.schedule()
    assert goodbye is not None
    assert (goodbye.total_num_scheduled_tokens, goodbye.finished_req_ids) == (0, {"r"})
    assert scheduler.schedule() is None
