"""What the benchmark of detection measures does find faults, and nothing in healthy traffic."""

import pytest
from bench_detect import find, made_engine, measure
from made_ranks import made_records

from rankscope_server.domain.model import FindingKind


@pytest.mark.parametrize("kind", FindingKind)
def test_each_kind_is_found_in_the_traffic_that_is_measured(kind):
    """A detector that finds nothing is cheap."""
    assert find(kind)


def test_healthy_traffic_is_looked_at_whole():
    """Several engines with several stages: nothing is found, and every look has a cost."""
    records = made_records(1, 60)
    looking, absorbing = measure([made_engine(4, 2, records) for _ in range(2)], 3)
    assert (len(looking), len(absorbing)) == (3, 3)
    assert all(seconds > 0 for seconds in looking)
