"""
Metric families by their row of the table.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract.metrics import MetricSpec


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
        self.family(spec).add_sample(spec.name, rank.labels.more(**labels) if labels else rank.labels, value)

    def add_own(self, spec: MetricSpec, value: float, **labels: str) -> None:
        """
        Add a sample that belongs to no rank.
        """
        self.family(spec).add_sample(spec.name, labels, value)

    def add_histogram(
        self,
        spec: MetricSpec,
        rank: RankReading,
        bounds: Sequence[tuple[str, int]],
        counts: Sequence[int],
        total: float,
    ) -> None:
        """
        Add a histogram of one rank: `bounds` are those that are served, each with the last of `counts` that is below it.
        """
        family, labels = self.family(spec), rank.labels
        bucket = f"{spec.name}_bucket"
        below = done = 0
        for bound, index in bounds:
            below += sum(counts[done : index + 1])
            done = index + 1
            family.add_sample(bucket, labels.more(le=bound), below)
        family.add_sample(f"{spec.name}_count", labels, below)
        family.add_sample(f"{spec.name}_sum", labels, total)

    def family(self, spec: MetricSpec) -> Metric:
        """
        The family of `spec`, made if it is not there.
        """
        family = self._families.get(spec.name)
        if family is None:
            name = spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name
            unit = spec.unit if spec.unit and name.endswith("_" + spec.unit) else ""
            family = self._families[spec.name] = Metric(name, spec.help, spec.kind, unit)
        return family
