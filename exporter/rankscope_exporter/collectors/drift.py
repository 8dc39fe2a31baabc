"""
Drift.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import metrics as m


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Drift of each rank whose lengths are known.
    """
    out = Families()
    for rank in ranks:
        if (state := rank.measured) is not None:
            out.add(m.DRIFT_SUM, rank, int(state["drift_sum"]))
            out.add(m.DRIFT_MAX, rank, int(state["drift_max"]))
            out.add(m.DRIFTING, rank, int(state["drifting"]))
    return out
