"""
Following a rank, and aligning ranks, under every order of looks and steps.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_exporter.commands.align import align
from rankscope_exporter.commands.follow import (
    STANDING_SECONDS,
    Ended,
    Follower,
    LifeChanged,
    Look,
    Lost,
    Standing,
    told_at_start,
)
from rankscope_exporter.contract import Phase, RankLife
from rankscope_exporter.flight.layout import STEP_DTYPE

CAPACITY = 8
relaxed = settings(deadline=None)


def made(step: int, phase: int = Phase.DONE, **fields: int) -> np.ndarray:
    """One record."""
    record = np.zeros(1, STEP_DTYPE)
    for name, value in ({"step": step, "phase": phase} | fields).items():
        record[name] = value
    return record


def ring(last: int, phase: int, torn: set[int], after: int) -> np.ndarray:
    """What a reader gets of a ring that has come to `phase` of step `last`; records of `torn` steps cannot be had."""
    steps = range(max(after + 1, last - CAPACITY + 1, 1), last + 1)
    records = [made(step, phase if step == last else Phase.DONE) for step in steps if step not in torn]
    return np.concatenate([np.zeros(0, STEP_DTYPE), *records])


looks = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.integers(Phase.SCHEDULED, Phase.DONE),
        st.sets(st.integers(0, CAPACITY), max_size=3),
        st.sampled_from(RankLife),
        st.floats(0, 5),
    ),
    max_size=25,
)


@relaxed
@given(looks=looks, start=st.integers(0, 20), from_start=st.booleans())
def test_each_step_is_told_once_or_as_lost(looks: list, start: int, from_start: bool):
    """However the rank moves between looks, every step is told once, in order, or lies in one stretch that is told as lost."""
    last, now = start, 0.0
    first = ring(last, Phase.DONE, set(), 0)
    follower = Follower(told_at_start(first, last, from_start=from_start))
    expected = follower.told + 1
    life = RankLife.RUNNING
    for by, phase, offsets, next_life, seconds in looks:
        last, now = last + by, now + seconds
        torn = {last - offset for offset in offsets}
        events = list(follower.look(Look(last, ring(last, phase, torn, follower.told), next_life, now)))
        for event in events:
            if isinstance(event, Ended):
                assert event.record["step"] == expected
                assert event.record["phase"] == Phase.DONE or event.record["step"] < last
                expected += 1
            elif isinstance(event, Lost):
                assert event.first == expected <= event.last < last + 1
                expected = event.last + 1
            elif isinstance(event, Standing):
                assert event.record["step"] == last
                assert event.seconds >= STANDING_SECONDS
            else:
                assert isinstance(event, LifeChanged)
                assert event.life is next_life is not life
        life = next_life
        assert follower.told == expected - 1 <= last


def test_a_step_that_stands_is_told_once_for_each_phase():
    """A step that does not move is told of after a while, again when it has come to another phase, and once more when it ends."""
    follower = Follower(4)
    said = []
    for now, phase in [(0, 1), (1, 1), (2, 1), (9, 1), (10, 2), (11, 2), (12, 2), (13, 4)]:
        said += [(now, type(e)) for e in follower.look(Look(5, made(5, phase), RankLife.RUNNING, float(now)))]

    assert said == [(2, Standing), (12, Standing), (13, Ended)]


def test_a_failed_step_has_ended():
    """A step that an error of vLLM ended is told at once, with the phase that it had come to."""
    events = list(Follower(4).look(Look(5, made(5, Phase.DECIDED, failed=1), RankLife.RUNNING, 0.0)))

    assert [type(event) for event in events] == [Ended]


def test_steps_that_can_never_be_read_are_told_as_lost():
    """A file whose last step names records that are not there is told of at the second look, once."""
    follower = Follower(4)
    nothing = np.zeros(0, STEP_DTYPE)
    told = [list(follower.look(Look(2**60, nothing, RankLife.RUNNING, 0.0))) for _ in range(3)]

    assert told == [[], [Lost(5, 2**60 - 1)], []]


def test_where_following_begins():
    """From now on: all but the step in flight counts as told. From the start: nothing that the ring holds."""
    done, flying = ring(20, Phase.DONE, set(), 0), ring(20, Phase.DECIDED, set(), 0)

    assert [told_at_start(r, 20, from_start=False) for r in (done, flying)] == [20, 19]
    assert [told_at_start(r, 20, from_start=True) for r in (done, flying)] == [12, 12]
    assert told_at_start(ring(0, 4, set(), 0), 0, from_start=True) == 0


record = st.builds(
    dict, phase=st.integers(1, 4), batch_hash=st.integers(0, 1), guard=st.integers(0, 2), mask_hash=st.integers(0, 1), mask_known=st.integers(0, 1),
    width=st.integers(0, 2), posted=st.integers(0, 1),
)  # fmt: skip
ranks = st.lists(st.dictionaries(st.integers(1, 12), record, min_size=1), min_size=2, max_size=4)


def values(records: list[dict]) -> dict[str, list[int]]:
    """What ranks know of one step, said slowly."""
    decided = [r for r in records if r["phase"] >= Phase.DECIDED and r["guard"]]
    return {
        "batch": [r["batch_hash"] for r in records],
        "guard": [r["guard"] for r in decided],
        "mask": [r["mask_hash"] for r in decided if r["mask_known"]],
        "width": [r["width"] for r in decided if r["width"]],
        "posted": [r["posted"] for r in decided if r["phase"] == Phase.DONE],
    }


@relaxed
@given(ranks=ranks)
def test_ranks_differ_where_two_know_different_things(ranks: list[dict[int, dict]]):
    """The aligned steps are those that any rank has, and they differ in what two ranks know and disagree about."""
    alignment = align(
        [np.concatenate([made(s, **{**f, "phase": f["phase"]}) for s, f in sorted(rank.items())]) for rank in ranks]
    )
    steps = sorted({step for rank in ranks for step in rank})
    expected = []
    for step in steps:
        known = values([rank[step] for rank in ranks if step in rank])
        expected.append([what for what, told in known.items() if len(set(told)) > 1])

    assert alignment.steps.tolist() == steps
    assert [alignment.differences(i) for i in range(len(steps))] == expected
    assert alignment.first == next((i for i, what in enumerate(expected) if what), None)
    assert alignment.shared == sum(sum(step in rank for rank in ranks) >= 2 for step in steps)
    for rank, row in zip(ranks, alignment.rows, strict=True):
        assert [steps[i] for i in np.flatnonzero(row >= 0)] == sorted(rank)
