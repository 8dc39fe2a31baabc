"""
The forecast: what it says of engines that drift, and when it says that it cannot know.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ranks import START_UNIX, made_engine, made_rank, made_records, made_report, made_v2_report

from rankscope_exporter.contract import Guard, HookReport, HookState, MitigationState, Phase, RankLife
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts
from rankscope_server.domain.forecast import BEYOND_HORIZON, HORIZON_SECONDS, assess_forecast
from rankscope_server.domain.outlook import Forecast, Outlook

NOW = Moment(START_UNIX, 1000.0)


def engine_of(first: np.ndarray, last: np.ndarray | None = None, **report: Any) -> EngineFacts:
    """An engine of two ranks with these records."""
    last = made_records(1, len(first)) if last is None else last
    ranks = (
        made_rank(first, made_report(0, **report), now=NOW),
        made_rank(last, made_report(1, **report), now=NOW),
    )
    return made_engine(*ranks, now=NOW)


def drifting(step: int, masked: int = 3, requests: int = 8, every: int = 4, **fields: Any) -> dict[str, Any]:
    """A step of a first rank that drifts: so many of its requests are masked, and now and then one arrives and one ends."""
    comes = step % every == 0
    return {
        "requests": requests, "cached": requests - comes, "new": int(comes), "finished": int(step % every == 1), "drafting": requests - comes,
        "masked": masked, "drifting": masked + 1, "drift_max": 20, "drift_sum": 8 * masked + 2, "mask_hash": masked,
    } | fields  # fmt: skip


def forecast_of(first: np.ndarray, last: np.ndarray | None = None, **report: Any) -> Forecast:
    """What is said of such an engine."""
    return assess_forecast(engine_of(first, last, **report), NOW)


def test_a_batch_that_runs_out_of_unmasked_requests_is_in_sight() -> None:
    """With one request unmasked and none arriving, the ranks part within seconds, and the forecast names rank and reason."""
    records = made_records(1, 40, lambda step: drifting(step, masked=7, new=0, cached=8, finished=0))
    forecast = forecast_of(records)
    assert forecast.outlook is Outlook.IN_SIGHT
    assert forecast.rank == "pp0"
    assert forecast.earliest_seconds is not None
    assert forecast.latest_seconds is not None
    assert 0 <= forecast.earliest_seconds < forecast.latest_seconds
    assert forecast.earliest_seconds < 2
    assert forecast.reason.startswith("7 of 8 requests masked on pp0, ")


def test_more_arrivals_and_more_unmasked_requests_put_it_off() -> None:
    """The same engine with most of its requests unmasked, and new ones all the time, holds together for longer."""
    close = forecast_of(made_records(1, 200, lambda step: drifting(step, masked=7, every=20)))
    far = forecast_of(made_records(1, 200, lambda step: drifting(step, masked=3, every=2)))
    assert close.earliest_seconds is not None
    assert far.outlook is Outlook.NOT_IN_SIGHT or (far.earliest_seconds or 0.0) > 2 * close.earliest_seconds


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"pp_size": 1}, "there is only one pipeline rank"),
        ({"spec_tokens": 0}, "nothing is speculated"),
        ({"trim": MitigationState.APPLIED}, "the trim fix is applied"),
    ],
)
def test_what_cannot_part_is_not_in_sight(report: dict[str, Any], reason: str) -> None:
    """One pipeline rank, no speculation, or the fix applied: nothing is foreseen, and why is said."""
    forecast = forecast_of(made_records(1, 40, drifting), **report)
    assert forecast == Forecast(Outlook.NOT_IN_SIGHT, reason)


def test_an_engine_without_drift_is_not_in_sight() -> None:
    """Healthy steps, chunked prefill on all ranks among them, foresee nothing."""
    records = made_records(1, 200, lambda step: {"requests": 4, "masked": 4} if step % 50 == 0 else {})
    assert forecast_of(records, records) == Forecast(Outlook.NOT_IN_SIGHT, "no request drifts")


def test_an_idle_engine_is_not_in_sight() -> None:
    """Where no request runs, none can be masked."""
    records = made_records(1, 40, drifting)
    ranks = [made_rank(records, made_report(rank), now=NOW, quiet=60.0) for rank in range(2)]
    forecast = assess_forecast(made_engine(*ranks, now=NOW), NOW)
    assert forecast == Forecast(Outlook.NOT_IN_SIGHT, "no request is running")


def test_a_step_without_a_batch_hides_nothing() -> None:
    """Steps that only tell of requests that have ended come to no decision; the forecast rests on the others."""
    empty = {
        "requests": 0,
        "cached": 0,
        "new": 0,
        "masked": 0,
        "scheduled_tokens": 0,
        "guard": Guard.NONE,
        "mask_known": 0,
    }

    def change(step: int) -> dict[str, Any]:
        return drifting(step, masked=7) | (empty if step % 13 == 0 else {})

    forecast = forecast_of(
        made_records(1, 80, change), made_records(1, 80, lambda step: empty if step % 13 == 0 else {})
    )
    assert forecast.outlook is Outlook.IN_SIGHT


def test_ranks_that_have_parted_are_unknown() -> None:
    """After a guard disagreement there is nothing left to foresee."""
    first = made_records(
        1, 40, lambda step: drifting(step) if step < 40 else drifting(step, masked=8, guard=Guard.SKIP)
    )
    assert forecast_of(first) == Forecast(Outlook.UNKNOWN, "the ranks have parted already")


def test_v2_ranks_are_unknown() -> None:
    """The V2 runner's lengths are on the device, and say nothing here."""
    ranks = [made_rank(made_records(1, 40), made_v2_report(rank), now=NOW) for rank in range(2)]
    forecast = assess_forecast(made_engine(*ranks, now=NOW), NOW)
    assert forecast == Forecast(Outlook.UNKNOWN, "the V2 runner keeps its lengths on the device")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mask_known": 0}, "it is not known which requests pp0 masks"),
        ({"lengths": 0}, "the request-state lengths of pp0 are not known"),
    ],
)
def test_what_is_not_recorded_is_unknown(change: dict[str, int], reason: str) -> None:
    """Without masks or lengths there is no forecast, rather than a wrong one."""
    assert forecast_of(made_records(1, 40, lambda step: drifting(step, **change))) == Forecast(Outlook.UNKNOWN, reason)


def test_too_few_steps_are_unknown() -> None:
    """Nothing is said of an engine that has only just begun."""
    assert forecast_of(made_records(1, 3, drifting)) == Forecast(Outlook.UNKNOWN, "pp0 has been seen for 3 steps only")


def test_an_engine_that_is_not_seen_is_unknown() -> None:
    """A silent exporter, a rank that is missing or lost, a hook that is off: each is named."""
    engine = engine_of(made_records(1, 40, drifting))
    silent = made_engine(*engine.ranks, now=NOW, answered=NOW.monotonic - 5.0, error="refused")
    assert assess_forecast(silent, NOW).reason == "http://a:9610 does not answer"
    alone = dataclasses.replace(engine, ranks=engine.ranks[:1])
    assert assess_forecast(alone, NOW).reason == "1 rank is not seen"
    assert forecast_of(made_records(1, 40, drifting), life=RankLife.STOPPED).reason == "pp0 and pp1 take no more steps"
    off = [HookReport(hook="_update_states", state=HookState.OFF)]
    assert forecast_of(made_records(1, 40, drifting), hooks=off).reason == "hook _update_states of pp0 is off"
    assert all(
        forecast.outlook is Outlook.UNKNOWN for forecast in (assess_forecast(silent, NOW), assess_forecast(alone, NOW))
    )


def test_data_that_are_older_leave_less_time() -> None:
    """The interval counts from now, not from the newest step."""
    records = made_records(1, 40, lambda step: drifting(step, masked=7, new=0, cached=8, finished=0))
    fresh = forecast_of(records)
    steps = (records, made_records(1, 40))
    ranks = [made_rank(steps[rank], made_report(rank), now=NOW, quiet=1.0) for rank in (0, 1)]
    late = assess_forecast(made_engine(*ranks, now=NOW), NOW)
    assert fresh.latest_seconds is not None
    assert late.latest_seconds == pytest.approx(max(0.0, fresh.latest_seconds - 1.0))


def test_the_worst_of_batches_that_take_turns_counts() -> None:
    """With two batches in turn, one all but masked and one clean, the forecast is that of the first."""

    def turn(step: int) -> dict[str, Any]:
        return drifting(step, masked=7, requests=8, new=0, cached=8, finished=0) if step % 2 else {"requests": 3}

    forecast = forecast_of(made_records(1, 100, turn))
    assert forecast.outlook is Outlook.IN_SIGHT
    assert forecast.reason.startswith("7 of 8 requests masked")


COUNTS = st.one_of(st.integers(0, 9), st.just((1 << 32) - 1))
"""Counts as another process's memory may have them."""


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(*[COUNTS] * 4, st.integers(0, 9), COUNTS, st.sampled_from(list(Phase)[1:])), min_size=1, max_size=80
    )
)
def test_whatever_is_recorded_the_forecast_is_sound(steps: list[tuple[int, ...]]) -> None:
    """Records that make no sense raise nothing: an interval is in order and within bounds, or there is none."""

    def step_of(step: int) -> dict[str, Any]:
        new, cached, finished, masked, drift, requests, phase = steps[step - 1]
        return {
            "new": new, "cached": cached, "finished": finished, "drifting": drift, "drift_sum": 3 * drift - 9, "drift_max": drift,
            "drafting": cached, "phase": Phase(phase), "requests": requests, "masked": min(masked, requests), "guard": Guard.BROADCAST,
        }  # fmt: skip

    forecast = forecast_of(made_records(1, len(steps), step_of), made_records(1, len(steps)))
    assert forecast.reason
    if forecast.outlook is Outlook.IN_SIGHT:
        assert forecast.earliest_seconds is not None
        assert forecast.latest_seconds is not None
        assert 0 <= forecast.earliest_seconds <= forecast.latest_seconds <= BEYOND_HORIZON * HORIZON_SECONDS
    else:
        assert (forecast.earliest_seconds, forecast.latest_seconds, forecast.rank) == (None, None, "")
