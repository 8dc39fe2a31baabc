"""
Request-state length and scheduler length.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Bounds, Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Lengths
from rankscope_exporter.contract import metrics as m
from rankscope_exporter.flight.layout import BUCKET_BOUNDS

BUCKETS = Bounds.choose(
    BUCKET_BOUNDS,
    [i for i, bound in enumerate(BUCKET_BOUNDS) if bound in {0.0, float("inf")} or (bound >= 4 and i % 2)],
)
"""
Bounds that are served: 0, then powers of four, then infinity. The file is finer;
twice the samples in each scrape would buy nothing that a query asks for.
"""

_BASES = {int(basis): basis.name.lower().replace("_", " ") for basis in Lengths}


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    What the lengths of each rank count; their sum and largest of the last step, and the histograms, where they are known.
    """
    out = Families()
    for rank in ranks:
        if (reached := rank.parts.state) is not None:
            out.add(m.LENGTHS_BASIS, rank, 1, basis=_BASES.get(int(reached["lengths"]), "unknown"))
        if (state := rank.measured) is not None:
            out.add(m.STATE_SUM, rank, int(state["state_sum"]))
            out.add(m.STATE_MAX, rank, int(state["state_max"]))
            out.add(m.SCHEDULER_SUM, rank, int(state["scheduler_sum"]))
            out.add(m.SCHEDULER_MAX, rank, int(state["scheduler_max"]))
        histograms = rank.histograms
        if histograms.samples:
            out.add(m.LENGTH_SAMPLES, rank, histograms.samples)
            out.add_histogram(m.STATE_LENGTH, rank, BUCKETS, histograms.state, histograms.state_sum)
            out.add_histogram(m.SCHEDULER_LENGTH, rank, BUCKETS, histograms.scheduler, histograms.scheduler_sum)
    return out
