"""
Metric families by their row of the table.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.samples import Sample

from rankscope_exporter.collectors.labels import Labels
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract.metrics import MetricSpec

_REST = (None,) * (len(Sample._fields) - 3)
"""
What a sample has besides name, labels and value: nothing of ours.
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """
    Upper bounds of a histogram's buckets that are served: some of those that the flight file has.
    """

    shown: tuple[str, ...]
    """As they stand in the label `le`; the last one is infinity."""
    last: tuple[int, ...]
    """The last bucket of the flight file that each one takes in."""

    @classmethod
    def choose(cls, bounds: Sequence[float], chosen: Sequence[int]) -> "Bounds":
        """
        Those of `bounds` that have the index `chosen`; the last one of all has to be among them.
        """
        return cls(tuple("+Inf" if bounds[i] == float("inf") else str(bounds[i]) for i in chosen), tuple(chosen))


class Families:
    """
    Gathers samples into families, in the order in which the families first appear.
    """

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())

    def add(self, spec: MetricSpec, rank: RankReading, value: float, **labels: str) -> None:
        """
        Add a sample of one rank; `labels` are those besides the rank's own.
        """
        self._append(spec, spec.name, rank.labels.more(**labels) if labels else rank.labels, value)

    def add_own(self, spec: MetricSpec, value: float, **labels: str) -> None:
        """
        Add a sample that belongs to no rank.
        """
        self._append(spec, spec.name, labels, value)

    def add_labels(self, spec: MetricSpec, labels: Labels, value: float) -> None:
        """
        Add a sample with labels that are kept from scrape to scrape.
        """
        self._append(spec, spec.name, labels, value)

    def add_states(
        self, spec: MetricSpec, labels: Labels, label: str, states: tuple[str, ...], now: Collection[str]
    ) -> None:
        """
        Add a sample for each of `states`, which the label `label` names: 1 for those that hold now, 0 for the others.
        """
        for state, of_state in zip(states, labels.each(label, states), strict=True):
            self._append(spec, spec.name, of_state, state in now)

    def add_histogram(
        self, spec: MetricSpec, rank: RankReading, bounds: Bounds, counts: Sequence[int], total: float
    ) -> None:
        """
        Add a histogram of one rank; `counts` are those of the flight file's buckets, not summed up.
        """
        bucket, count, whole = spec.sample_names
        below = done = 0
        for index, of_bound in zip(bounds.last, rank.labels.each("le", bounds.shown), strict=True):
            below += sum(counts[done : index + 1])
            done = index + 1
            self._append(spec, bucket, of_bound, below)
        self._append(spec, count, rank.labels, below)
        self._append(spec, whole, rank.labels, total)

    def _append(self, spec: MetricSpec, name: str, labels: dict[str, str], value: float) -> None:
        # What `Metric.add_sample` does, at half the price: there are thousands in a scrape.
        family = self._families.get(spec.name) or self._begin(spec)
        family.samples.append(tuple.__new__(Sample, (name, labels, value, *_REST)))

    def _begin(self, spec: MetricSpec) -> Metric:
        name = spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name
        unit = spec.unit if spec.unit and name.endswith("_" + spec.unit) else ""
        family = self._families[spec.name] = Metric(name, spec.help, spec.kind, unit)
        return family
