"""
What Rankscope itself costs and gets wrong inside a rank.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import metrics as m
from rankscope_exporter.flight.layout import OWN_TIME_STEPS


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Faults and own time of each rank.
    """
    out = Families()
    for rank in ranks:
        out.add(m.FAULTS, rank, rank.faults)
        if (done := rank.parts.done) is not None:
            out.add(m.OWN_SECONDS, rank, int(done["own_ns_total"]) / 1e9)
            out.add(m.OWN_STEPS, rank, int(done["step"]) // OWN_TIME_STEPS)
    return out
