"""Series for charts."""

import numpy as np
from made_ranks import START_UNIX, made_records, made_report, made_v2_records

from rankscope_server.control.charts import build_series, clamp_span
from rankscope_server.domain.model import RankId
from rankscope_server.ingest.seconds import SecondSeries
from rankscope_server.ingest.tracks import RankTrack
from rankscope_server.store import SampleRow

T = int(START_UNIX)


def track(drifts, pp_rank=0, begin=T):
    made = RankTrack("http://a", made_report(pp_rank), 0.0, 0.0)
    records = made_records(1, len(drifts), lambda step: {"drift_max": drifts[step - 1]})
    made.seconds.absorb(records, begin + np.arange(len(drifts), dtype=float))
    return made


def test_each_second_has_its_largest_drift():
    """Ranks beside each other; seconds without a step are unknown, not zero."""
    series = build_series([track([1, 2, 3]), track([0, 0], 1)], [], T, T + 4, 100)
    assert series.labels == ["pp0", "pp1"]
    assert series.times_unix == [T, T + 1, T + 2, T + 3]
    assert series.values == [[1, 2, 3, None], [0, 0, None, None]]


def test_fewer_points_keep_the_peaks():
    """A point is the largest value of what it stands for, and points stay where they are."""
    drifts = [0] * 600
    drifts[333] = 41
    series = build_series([track(drifts)], [], T, T + 600, 50)
    assert len(series.times_unix) <= 51
    assert max(value for value in series.values[0] if value is not None) == 41
    later = build_series([track(drifts)], [], T + 5, T + 605, 50)
    assert set(later.times_unix) & set(series.times_unix)


def test_what_is_before_memory_comes_from_the_store():
    """One line, from the store into memory."""
    stored = [SampleRow("chat", "e1", RankId(0, 0, 0), T - 2 + n, 7, 9, 20, 4) for n in range(2)]
    series = build_series([track([1, 2])], stored, T - 3, T + 2, 100)
    assert series.values == [[None, 7, 7, 1, 2]]


def test_nothing_is_asked_for_beyond_reason():
    """The future is cut off, and so is what is too far back."""
    assert clamp_span(T - 60, T + 999, T + 1) == (T - 60, T + 1)
    since, until = clamp_span(-1e18, 1e18, T)
    assert (until, until - since) == (T, 31 * 86400)
    assert build_series([], [], T, T, 10).times_unix == []


def test_lengths_that_are_copies_draw_nothing():
    """On V2 only samples of the device's lengths do; a sample older than the hour that is held is dropped."""
    seconds = SecondSeries()
    seconds.absorb(made_v2_records(1, 10, lambda _: {"drift_max": 9}), T + np.arange(10.0))
    assert (seconds.first, seconds.last) == (0, 0)
    seconds.note(T + 3, 5, 8)
    seconds.note(T - 4000, 7, 8)
    assert seconds.drift(np.array([T + 2, T + 3]))[1] == 5
    assert [(s.second - T, s.drift_max, s.requests) for s in seconds.take(T + 10)] == [(3, 5, 8)]


def test_seconds_are_handed_out_once():
    """Whole seconds only, each one time."""
    seconds = SecondSeries()
    seconds.absorb(made_records(1, 100, lambda s: {"drift_max": s}), T + np.arange(100) / 10)
    assert [(s.second - T, s.drift_max, s.steps) for s in seconds.take(T + 3)] == [
        (0, 10, 10),
        (1, 20, 10),
        (2, 30, 10),
    ]
    assert [s.second - T for s in seconds.take(T + 5)] == [3, 4]
    assert list(seconds.take(T + 5)) == []
