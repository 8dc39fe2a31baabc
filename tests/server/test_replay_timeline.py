"""What was known of a rank's steps at a moment: a replay sees no record earlier than the server would have."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ranks import begin_ns, made_record, made_records

from rankscope_exporter.contract import Guard, Phase
from rankscope_exporter.flight import layout
from rankscope_server.domain.history import StepHistory
from rankscope_server.replay.timeline import Timeline, as_of


def test_a_step_shows_its_parts_one_after_the_other():
    """Begun, decided, done: each only once its time has come, and zero before that."""
    timeline, history = Timeline(made_records(1, 1), since=0), StepHistory()
    begin = begin_ns(1)
    seen = []
    for at in (begin - 1, begin, begin + 10_000_000, begin + 15_000_000):
        timeline.give(history, at)
        newest = history.newest()
        seen.append(None if newest is None else (int(newest["phase"]), int(newest["guard"]), int(newest["end_ns"]) > 0))

    assert seen == [
        None,
        (Phase.STATE_UPDATED, Guard.NONE, False),
        (Phase.DECIDED, Guard.BROADCAST, False),
        (Phase.DONE, Guard.BROADCAST, True),
    ]


def test_a_failure_is_known_with_the_last_part():
    """A step is not failed before it came to the phase that it failed in."""
    timeline, history = Timeline(made_record(1, Phase.DECIDED, failed=1), since=0), StepHistory()

    timeline.give(history, begin_ns(1))
    assert not history.newest()["failed"]
    timeline.give(history, begin_ns(1) + 10_000_000)
    assert history.newest()["failed"]


def test_records_that_claim_to_be_older_than_their_file_are_left_out():
    """Their times make no sense, and would send the replay back for years."""
    timeline = Timeline(made_records(1, 5), since=begin_ns(3))

    assert (len(timeline), timeline.left_out) == (3, 2)


def test_no_records():
    """A rank that began no step has no moment and nothing to give."""
    timeline, history = Timeline(np.zeros(0, layout.STEP_DTYPE), since=0), StepHistory()

    timeline.give(history, 1 << 60)

    assert (len(timeline.moments), timeline.last_ns, history.last) == (0, None, 0)


def test_as_of_leaves_the_original_alone():
    """Records are copied: the file's own stay whole."""
    records = made_records(1, 2)
    before = records.tobytes()

    as_of(records, np.array([1, 4], np.uint8))

    assert records.tobytes() == before


@st.composite
def any_records(draw: st.DrawFn) -> np.ndarray:
    """Records whose steps overlap as they may on a rank with two in flight, the last ones in any phase; with holes."""
    steps = sorted(draw(st.sets(st.integers(1, 80), max_size=30)))
    records, begin = [], 0
    for step in steps:
        begin += draw(st.integers(0, 40))
        decide = begin + draw(st.integers(0, 60))
        end = decide + draw(st.integers(0, 60))
        phase = Phase.DONE if step != steps[-1] else draw(st.sampled_from(list(Phase)[1:]))
        times = {"begin_ns": begin, "decide_ns": decide * (phase >= Phase.DECIDED), "end_ns": end * (phase >= Phase.DONE)}  # fmt: skip
        records.append(made_record(step, phase, **times))
    return np.concatenate(records) if records else np.zeros(0, layout.STEP_DTYPE)


@settings(max_examples=150, deadline=None)
@given(records=any_records(), looks=st.lists(st.integers(-5, 6000), max_size=20))
def test_what_is_given_does_not_depend_on_when_it_is_looked_at(records: np.ndarray, looks: list[int]):
    """However often one looks, a moment shows the same: all that was written by then, and nothing that came later."""
    timeline, history = Timeline(records, since=0), StepHistory()
    for at in sorted(looks):
        timeline.give(history, at)
        fresh = StepHistory()
        Timeline(records, since=0).give(fresh, at)
        assert history.tail(100).tobytes() == fresh.tail(100).tobytes()
        held = history.tail(100)
        assert (held["begin_ns"] <= at).all()
        assert (held["decide_ns"] <= max(at, 0)).all()
        assert (held["end_ns"] <= max(at, 0)).all()
        assert len(held) == int((timeline.begun <= at).sum())
    timeline.give(history, 1 << 60)
    assert history.tail(100).tobytes() == records.tobytes()


@pytest.mark.parametrize("phase", [Phase.SCHEDULED, Phase.STATE_UPDATED, Phase.DECIDED])
def test_a_step_that_never_ended_stays_where_it_is(phase: Phase):
    """The last record of a rank that hangs never goes beyond the phase in which it was left."""
    history = StepHistory()
    timeline = Timeline(np.concatenate([made_records(1, 2), made_record(3, phase)]), since=0)
    timeline.give(history, 1 << 60)

    assert int(history.newest()["phase"]) == phase
