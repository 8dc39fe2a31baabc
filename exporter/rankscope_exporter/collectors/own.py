"""
What Rankscope itself costs and gets wrong inside a rank.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Bounds, Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Detail
from rankscope_exporter.contract import metrics as m
from rankscope_exporter.flight.layout import OWN_BOUNDS

BUCKETS = Bounds.choose(OWN_BOUNDS, range(1, len(OWN_BOUNDS), 2))
"""
Bounds that are served: 2 microseconds, then powers of four of it, then infinity.
"""

_LEVELS = tuple(level.name.lower() for level in Detail)


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Faults, own time and what it still allows, of each rank.
    """
    out = Families()
    for rank in ranks:
        out.add(m.FAULTS, rank, rank.faults)
        out.add_states(m.DETAIL, rank.labels, "level", _LEVELS, (_LEVELS[rank.detail],))
        if any((own := rank.own_time).steps):
            out.add_histogram(m.OWN_TIME, rank, BUCKETS, own.steps, own.seconds)
    return out
