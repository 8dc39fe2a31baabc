"""
Request-state length and scheduler length.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.labels import Labels
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import metrics as m
from rankscope_exporter.flight.layout import BUCKET_BOUNDS

BUCKETS: tuple[tuple[str, int], ...] = tuple(
    ("+Inf" if bound == float("inf") else str(bound), index)
    for index, bound in enumerate(BUCKET_BOUNDS)
    if bound in {0.0, float("inf")} or (bound >= 4 and index % 2)
)
"""
Bounds that are served, with their bucket in the flight file: 0, then powers of four, then infinity. The file is finer;
twice the samples in each scrape would buy nothing that a query asks for.
"""


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Sum and largest of the last step, and the histograms, of each rank whose lengths are known.
    """
    out = Families()
    for rank in ranks:
        state = rank.measured
        if state is not None:
            out.add(m.STATE_SUM, rank, int(state["state_sum"]))
            out.add(m.STATE_MAX, rank, int(state["state_max"]))
            out.add(m.SCHEDULER_SUM, rank, int(state["scheduler_sum"]))
            out.add(m.SCHEDULER_MAX, rank, int(state["scheduler_max"]))
        histograms = rank.histograms
        if histograms.samples:
            out.add(m.LENGTH_SAMPLES, rank, histograms.samples)
            bounds = [(rank.labels.more(le=bound), index) for bound, index in BUCKETS]
            _histogram(out.family(m.STATE_LENGTH), rank.labels, bounds, histograms.state, histograms.state_sum)
            _histogram(
                out.family(m.SCHEDULER_LENGTH), rank.labels, bounds, histograms.scheduler, histograms.scheduler_sum
            )
    return out


def _histogram(
    family: Metric, labels: Labels, bounds: Sequence[tuple[Labels, int]], counts: Sequence[int], total: int
) -> None:
    bucket = f"{family.name}_bucket"
    below = 0
    done = 0
    for bound, index in bounds:
        below += sum(counts[done : index + 1])
        done = index + 1
        family.add_sample(bucket, bound, below)
    family.add_sample(f"{family.name}_count", labels, below)
    family.add_sample(f"{family.name}_sum", labels, total)
