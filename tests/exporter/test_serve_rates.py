"""
Token buckets: never more than allowed, never less than allowed, never more memory than allowed.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.serve.rates import Rates, client_key

RATE, BURST = st.floats(0.1, 200), st.integers(1, 50)
GAPS = st.lists(st.floats(0, 5), min_size=1, max_size=120)
EPSILON = 1e-6


@given(rate=RATE, burst=BURST, gaps=GAPS)
def test_never_more_than_burst_and_rate(rate: float, burst: int, gaps: list[float]) -> None:
    """In no stretch of time does a client get more than the burst and what the rate gives for that time."""
    rates, now, passed = Rates(rate, burst), 1000.0, []
    for gap in gaps:
        now += gap
        if rates.take("a", now) == 0.0:
            passed.append(now)

    for first, begin in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + rate * (passed[last] - begin) + EPSILON


@given(rate=RATE, burst=BURST, gaps=GAPS)
def test_told_time_is_enough(rate: float, burst: int, gaps: list[float]) -> None:
    """A client that waits as long as it was told gets through, and not long before."""
    rates, now = Rates(rate, burst), 1000.0
    for gap in gaps:
        now += gap
        if seconds := rates.take("a", now):
            assert seconds <= 1 / rate + EPSILON
            assert rates.wait("a", now + seconds / 2) > 0
            now += seconds + EPSILON
            assert rates.wait("a", now) == 0.0
            assert rates.take("a", now) == 0.0


@given(rate=RATE, burst=BURST, taken=st.integers(0, 200))
def test_recovers(rate: float, burst: int, taken: int) -> None:
    """However many were refused, a pause of burst / rate seconds brings the whole burst back, and no more."""
    rates = Rates(rate, burst)
    for _ in range(taken):
        rates.take("a", 0.0)

    later = burst / rate + EPSILON

    assert [rates.take("a", later) == 0.0 for _ in range(burst + 1)] == [True] * burst + [False]


@given(times=st.lists(st.floats(-1e6, 1e6), max_size=60))
def test_clock_that_jumps(times: list[float]) -> None:
    """A clock that goes back gives nothing twice."""
    rates = Rates(1.0, 5)
    passed = sum(rates.take("a", now) == 0.0 for now in times)

    reached = max(times, default=0.0) - (times[0] if times else 0.0)
    assert passed <= 5 + reached + EPSILON


@given(keys=st.lists(st.integers(0, 30), max_size=200))
def test_bounded_memory(keys: list[int]) -> None:
    """However many clients there are, no more are remembered than there is room for, and forgetting lets through."""
    rates = Rates(0.001, 1, capacity=8)
    for now, key in enumerate(keys):
        rates.take(str(key), now / 1000)
        assert len(rates) <= 8
    assert rates.take("never seen", 1.0) == 0.0


def test_clients_are_apart() -> None:
    """One that sends too much takes nothing from another."""
    rates = Rates(1.0, 2)
    assert [rates.take("a", 0.0) == 0.0 for _ in range(3)] == [True, True, False]
    assert rates.take("b", 0.0) == 0.0


def test_off() -> None:
    """A rate of 0 lets everything through and remembers nobody."""
    rates = Rates(0, 1)
    assert [rates.take("a", 0.0) for _ in range(1000)] == [0.0] * 1000
    assert rates.wait("a", 0.0) == 0.0
    assert len(rates) == 0


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_client_key(address: str, key: str) -> None:
    """One client is one IPv4 address or one network of IPv6, as whoever has one address of it has them all."""
    assert client_key(address) == key
