"""
The plan of a soak.
"""

from events import BUSY_SHARE, Event, Kind, full_life, plan_events
from hypothesis import given
from hypothesis import strategies as st

COUNTS = {"exporter_restarts": st.integers(0, 12), "vllm_restarts": st.integers(0, 5), "stops": st.integers(0, 4)}


def lives(events: tuple[Event, ...]) -> list[list[Kind]]:
    """The events of each life of vLLM, the restarts between them left out."""
    found: list[list[Kind]] = [[]]
    for event in events:
        if event.kind is Kind.VLLM_RESTART:
            found.append([])
        else:
            found[-1].append(event.kind)
    return found


@given(seconds=st.floats(30, 7200), seed=st.integers(0, 99), **COUNTS)
def test_all_that_was_asked_for_happens_in_order(
    seconds: float, seed: int, exporter_restarts: int, vllm_restarts: int, stops: int
) -> None:
    """Each event is there, one after the other, and the last quarter of the time is quiet."""
    events = plan_events(
        seconds, exporter_restarts=exporter_restarts, vllm_restarts=vllm_restarts, stops=stops, seed=seed
    )
    kinds = [event.kind for event in events]
    assert kinds.count(Kind.VLLM_RESTART) == vllm_restarts
    assert kinds.count(Kind.STOP_WORKER) == stops
    assert len(kinds) == exporter_restarts + vllm_restarts + stops
    times = [event.at_seconds for event in events]
    assert times == sorted(times)
    assert all(0 < at <= seconds * BUSY_SHARE for at in times)


@given(seed=st.integers(0, 99), **COUNTS)
def test_nothing_happens_without_room(seed: int, exporter_restarts: int, vllm_restarts: int, stops: int) -> None:
    """The life without room has no other event, a life follows it, and without restarts there is none."""
    events = plan_events(600, exporter_restarts=exporter_restarts, vllm_restarts=vllm_restarts, stops=stops, seed=seed)
    full = full_life(vllm_restarts)
    assert (full is None) == (vllm_restarts == 0)
    if full is not None:
        assert lives(events)[full] == []
        assert full < vllm_restarts


def test_three_exporter_restarts_are_one_of_each_kind() -> None:
    """A short soak ends, kills and keeps away the exporter once each."""
    events = plan_events(120, exporter_restarts=3, vllm_restarts=1, stops=1, seed=1)
    assert {event.kind for event in events} == set(Kind)


def test_the_same_seed_makes_the_same_plan() -> None:
    """A soak that failed can be repeated."""
    plans = [plan_events(1800, exporter_restarts=10, vllm_restarts=3, stops=2, seed=seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
