"""
One scrape: which ranks and metrics it is about, the collectors run one by one, the text that comes out.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

from rankscope_exporter import __version__
from rankscope_exporter.collectors import (
    batch,
    blind,
    collectives,
    device,
    drift,
    failures,
    guard,
    hooks,
    lengths,
    mask,
    mitigation,
    nccl,
    own,
    rank,
)
from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.nccl import NcclView
from rankscope_exporter.collectors.reading import RankReading, current
from rankscope_exporter.collectors.text import encode
from rankscope_exporter.contract.metrics import (
    COLLECTOR_DURATION,
    COLLECTOR_FAILURES,
    COLLECTOR_SUCCESS,
    CONTROL_ENABLED,
    EXPORTER_INFO,
    FLIGHT_FILES,
    METRICS,
    RANK_LABELS,
    MetricSpec,
)

logger = logging.getLogger("rankscope.exporter")

Collect = Callable[[Sequence[RankReading]], Iterable[Metric]]

SUBJECTS: dict[str, Collect] = {
    "rank": rank.collect,
    "batch": batch.collect,
    "lengths": lengths.collect,
    "drift": drift.collect,
    "mask": mask.collect,
    "guard": guard.collect,
    "collectives": collectives.collect,
    "mitigation": mitigation.collect,
    "device": device.collect,
    "failures": failures.collect,
    "blind": blind.collect,
    "hooks": hooks.collect,
    "own": own.collect,
}

_BY_NAME: dict[str, MetricSpec] = {name: spec for spec in METRICS for name in (spec.name, *spec.sample_names)}
_FAMILY_NAME = {
    spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name: spec.name for spec in METRICS
}


class QueryError(ValueError):
    """
    A query that `/metrics` does not understand; the message says what it does understand.
    """


@dataclass(frozen=True, slots=True)
class Query:
    """
    What a scrape asks for: values per rank label (any of them will do), and metrics; nothing chosen means all.
    """

    labels: dict[str, frozenset[str]] = field(default_factory=dict)
    metrics: frozenset[str] = frozenset()

    def wants_rank(self, reading: RankReading) -> bool:
        """
        Whether this rank is asked for.
        """
        return all(value in self.labels.get(name, (value,)) for name, value in reading.labels.items())

    def wants_subject(self, subject: str) -> bool:
        """
        Whether a metric of this subject is asked for.
        """
        return not self.metrics or any(_BY_NAME[name].subject == subject for name in self.metrics)

    def wants_metric(self, family: Metric) -> bool:
        """
        Whether this family is asked for.
        """
        return not self.metrics or _FAMILY_NAME[family.name] in self.metrics


def parse_query(items: Iterable[tuple[str, str]]) -> Query:
    """
    The query of a request to `/metrics`.

    Raises:
        QueryError: an unknown parameter or metric, or a rank that is no number.

    """
    labels: dict[str, set[str]] = {}
    metrics: set[str] = set()
    for name, value in items:
        if name == "name[]":
            if value not in _BY_NAME:
                msg = f"name[]: there is no metric {value!r}; docs/metrics.md lists them"
                raise QueryError(msg)
            metrics.add(_BY_NAME[value].name)
        elif name not in RANK_LABELS:
            msg = f"unknown query parameter {name!r}; known here: {', '.join((*RANK_LABELS, 'name[]'))}"
            raise QueryError(msg)
        elif name != "engine" and not (value.isascii() and value.isdigit()):
            msg = f"{name}: {value!r} is not a rank number"
            raise QueryError(msg)
        else:
            labels.setdefault(name, set()).add(value if name == "engine" else str(int(value)))
    return Query({name: frozenset(values) for name, values in labels.items()}, frozenset(metrics))


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """
    What a scrape tells of the exporter process and its directory.
    """

    node: str
    flight_dir: str
    control: bool
    unreadable: int
    nccl: tuple[NcclView, ...] = ()
    """One for each RAS port; none where the NCCL view is off."""


class CollectorFailures:
    """
    How often each collector of this process failed, by the class of the error. A scrape comes every few seconds, so that
    each class is logged once.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}

    def note(self, subject: str, error: Exception) -> None:
        """
        Count a failure, and log it if it is the first of its class.
        """
        key = (subject, type(error).__name__)
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] == 1:
            logger.error(
                "collector %s failed: its metrics are missing from this scrape; further failures of this kind are counted only, in %s",
                subject,
                COLLECTOR_FAILURES.name,
                exc_info=error,
            )


@dataclass(frozen=True, slots=True)
class _Outcome:
    success: bool
    seconds: float


class _Guarded:
    """
    A collector whose failure costs its own metrics and nothing else.
    """

    def __init__(self, subject: str, collect: Callable[[], Iterable[Metric]], query: Query, report: "_Report") -> None:
        self._subject = subject
        self._collect = collect
        self._query = query
        self._report = report

    def collect(self) -> Iterable[Metric]:
        """
        The families that the scrape asks for; none if the collector fails.
        """
        begin = time.perf_counter()
        families: list[Metric] = []
        try:
            families = [family for family in self._collect() if self._query.wants_metric(family)]
        except Exception as error:  # noqa: BLE001  whatever it is, the other collectors go on
            success = False
            self._report.failures.note(self._subject, error)
        else:
            success = True
        self._report.outcomes[self._subject] = _Outcome(success, time.perf_counter() - begin)
        return families


class _Report:
    """
    Tells of the collectors that were run before it.
    """

    def __init__(self, failures: CollectorFailures, query: Query) -> None:
        self.outcomes: dict[str, _Outcome] = {}
        self.failures = failures
        self._query = query

    def collect(self) -> Iterable[Metric]:
        """
        Success and duration of each collector, and failures so far.
        """
        out = Families()
        for subject, outcome in self.outcomes.items():
            out.add_own(COLLECTOR_SUCCESS, outcome.success, collector=subject)
            out.add_own(COLLECTOR_DURATION, outcome.seconds, collector=subject)
        for (subject, kind), count in self.failures.counts.items():
            out.add_own(COLLECTOR_FAILURES, count, collector=subject, kind=kind)
        return [family for family in out if self._query.wants_metric(family)]


def _node(facts: NodeFacts, readable: int, superseded: int) -> Iterable[Metric]:
    out = Families()
    out.add_own(EXPORTER_INFO, 1, node=facts.node, version=__version__, flight_dir=facts.flight_dir)
    for state, count in (("readable", readable), ("unreadable", facts.unreadable), ("superseded", superseded)):
        out.add_own(FLIGHT_FILES, count, state=state)
    out.add_own(CONTROL_ENABLED, facts.control)
    return out


def build_registry(
    readings: list[RankReading],
    facts: NodeFacts,
    query: Query,
    subjects: dict[str, Collect] = SUBJECTS,
    failures: CollectorFailures | None = None,
) -> CollectorRegistry:
    """
    A registry for one scrape; `failures` are those of the scrapes before it.
    """
    every = current(readings)
    ranks = [reading for reading in every if query.wants_rank(reading)]
    registry = CollectorRegistry()
    report = _Report(CollectorFailures() if failures is None else failures, query)
    for subject, collect in subjects.items():
        if query.wants_subject(subject):
            registry.register(_Guarded(subject, _bind(collect, ranks), query, report))
    if facts.nccl and query.wants_subject("nccl"):
        registry.register(_Guarded("nccl", lambda: nccl.collect(facts.nccl), query, report))
    if query.wants_subject("node"):
        registry.register(_Guarded("node", lambda: _node(facts, len(every), len(readings) - len(every)), query, report))
    registry.register(report)
    return registry


def _bind(collect: Collect, ranks: Sequence[RankReading]) -> Callable[[], Iterable[Metric]]:
    return lambda: collect(ranks)


def render(
    readings: list[RankReading],
    facts: NodeFacts,
    query: Query,
    accept: str,
    failures: CollectorFailures | None = None,
) -> tuple[bytes, str]:
    """
    The body of a scrape and its media type, in the format that `accept` (the header) asks for; `failures` as for `build_registry`.
    """
    _, media_type = choose_encoder(accept)
    # Our names are plain in every escaping but this one, which would double their underscores.
    media_type = media_type.replace("escaping=dots", "escaping=underscores")
    openmetrics = media_type.startswith("application/openmetrics-text")
    registry = build_registry(readings, facts, query, failures=failures)
    return encode(registry.collect(), openmetrics=openmetrics), media_type
