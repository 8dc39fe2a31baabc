"""
Device-side lengths of the V2 runner, where they are sampled.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import metrics as m


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    The last sample of each rank that takes some.
    """
    out = Families()
    for rank in ranks:
        if (sample := rank.device) is None:
            continue
        out.add(m.DEVICE_SAMPLES, rank, sample.samples)
        if not sample.samples:
            continue
        out.add(m.DEVICE_STEP, rank, sample.step)
        if sample.age_seconds is not None:
            out.add(m.DEVICE_AGE, rank, sample.age_seconds)
        out.add(m.DEVICE_REQUESTS, rank, sample.rows)
        out.add(m.DEVICE_TOTAL_SUM, rank, sample.total_sum)
        out.add(m.DEVICE_COMPUTED_SUM, rank, sample.computed_sum)
        out.add(m.DEVICE_EXCESS_REQUESTS, rank, sample.excess_rows)
        out.add(m.DEVICE_TOTAL_EXCESS, rank, sample.total_excess)
        out.add(m.DEVICE_COMPUTED_EXCESS, rank, sample.computed_excess)
    return out
