"""
Which alerts there are, and which of their conditions hold now: told by what was found and what is foreseen.

The names are those of the rules for Prometheus, so that routes and runbooks serve both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, ExporterFacts, joined, seconds
from rankscope_server.domain.model import Finding, FindingKind, Severity
from rankscope_server.domain.outlook import OPEN_SECONDS, Forecast, Outlook
from rankscope_server.domain.state import sentence_case

FORECAST_SECONDS = 600.0
"""
A wedge that may come sooner than this is worth an alert.
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """
    How long a condition must hold before its alert fires, and must be over before it is resolved; in seconds.
    """

    hold_seconds: float
    keep_seconds: float


@dataclass(frozen=True, slots=True)
class AlertRule:
    """
    One alert.
    """

    name: str
    kind: str
    """What it is about, as a label: the kind of the finding, `forecast` or `receiver`."""
    severities: tuple[Severity, ...]
    """What it may be, mildest first."""
    timing: Timing
    meaning: str
    """What it means and what to do first: the description of the alert."""


_WARNING = (Severity.WARNING,)
_CRITICAL = (Severity.CRITICAL,)
_AT_ONCE = Timing(0.0, 30.0)

RULES: Mapping[str, AlertRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            AlertRule(
                "RankscopeDrift", FindingKind.DRIFT.value, _WARNING, _AT_ONCE,
                "A rank counts more tokens than the scheduler. Its requests will be masked one after the other, their output goes wrong, "
                "and the engine wedges once all of a batch are. Turn the trim fix on. Fresh requests keep the engine going: do not drain it before it may be restarted.",
            ),
            AlertRule(
                "RankscopeMaskDisagreement", FindingKind.MASK_DISAGREEMENT.value, _CRITICAL, _AT_ONCE,
                "One rank discards a sampled token that another keeps: output is wrong from this step on, and nothing repairs it. "
                "Turn the trim fix on to end it, and have the requests concerned sent again.",
            ),
            AlertRule(
                "RankscopeGuardDisagreement", FindingKind.GUARD_DISAGREEMENT.value, _CRITICAL, _AT_ONCE,
                "One rank takes part in the sampled-token collective and another skips it: the engine wedges, while its health check still answers. "
                "Restart it, and turn the trim fix on before it takes traffic.",
            ),
            AlertRule(
                "RankscopeWidthMismatch", FindingKind.WIDTH_MISMATCH.value, _CRITICAL, _AT_ONCE,
                "Ranks exchange sampled tokens in different widths or numbers of collectives: output is wrong or the engine wedges. Restart it.",
            ),
            AlertRule(
                "RankscopeBatchMismatch", FindingKind.BATCH_MISMATCH.value, _CRITICAL, _AT_ONCE,
                "Ranks run different batches at the same step: nothing that follows can be trusted. Restart the engine.",
            ),
            AlertRule(
                "RankscopeWedged", FindingKind.WEDGED.value, _CRITICAL, _AT_ONCE,
                "The ranks have parted and none moves: no request will be answered until the engine is restarted.",
            ),
            AlertRule(
                "RankscopeStalled", FindingKind.STALLED.value, (Severity.WARNING, Severity.CRITICAL), _AT_ONCE,
                "No rank moves with a step in flight, and no disagreement is known: look at the GPUs, the network and the host before you restart it.",
            ),
            AlertRule(
                "RankscopeRankLost", FindingKind.RANK_LOST.value, _CRITICAL, _AT_ONCE,
                "A rank takes no further step while its peers wait for it. Read vLLM's log of that rank, and restart the engine.",
            ),
            AlertRule(
                "RankscopeMitigationMixed", FindingKind.MITIGATION_MIXED.value, _CRITICAL, Timing(2.0, 15.0),
                "Some ranks of the engine have the trim fix on and some do not: their request state parts. Turn it on or off again for all of them.",
            ),
            AlertRule(
                "RankscopeBlind", FindingKind.BLIND.value, _WARNING, Timing(15.0, 30.0),
                "Something that should be seen is not: until then no news is not good news.",
            ),
            AlertRule(
                "RankscopeForecast", "forecast", _WARNING, Timing(5.0, 60.0),
                "If traffic goes on as it does, every request of a batch will be masked on one rank, and the engine wedges. "
                "Turn the trim fix on while there is time. Fresh requests keep the engine going: do not drain it before it may be restarted.",
            ),
            AlertRule(
                "RankscopeReceiverFailing", "receiver", _WARNING, Timing(30.0, 30.0),
                "A receiver of alerts does not take what is sent to it: whoever relies on it does not hear of alerts.",
            ),
        )
    }
)  # fmt: skip
"""
All alerts by name.
"""

BY_KIND: Mapping[str, str] = MappingProxyType({rule.kind: rule.name for rule in RULES.values()})
"""
The alert for a kind of finding.
"""

_UNTIL_RESTART = frozenset({FindingKind.WEDGED, FindingKind.RANK_LOST})
"""
What still matters of an engine whose processes are all gone: that nothing has taken its place.
"""


@dataclass(frozen=True, slots=True)
class AlertKey:
    """
    What makes two alerts the same one.
    """

    name: str
    deployment: str
    """Empty where it is about the server itself."""
    engine: str
    """Empty where it is about a deployment."""
    subject: str = ""
    """What else it is about: the name of a receiver."""


@dataclass(frozen=True, slots=True)
class Condition:
    """
    That what an alert is about holds now.
    """

    key: AlertKey
    severity: Severity
    summary: str
    sources: tuple[str, ...] = ()
    """Addresses of the exporters that could tell if it were over."""
    incident: str = ""


def assess_engine(
    engine: EngineFacts,
    findings: Sequence[Finding],
    forecast: Forecast,
    *,
    incident: str = "",
    within_seconds: float = FORECAST_SECONDS,
) -> tuple[Condition, ...]:
    """
    Conditions that hold at an engine, from its current findings, the worst first, and its forecast.

    Ranks of several data-parallel groups may show the same kind of finding: that is one alert.
    """
    if engine.replaced:
        return ()
    if engine.ended:
        findings = [finding for finding in findings if finding.kind in _UNTIL_RESTART]
        # That processes are gone is what a restart of a wedged engine begins with.
        wedged = [finding for finding in findings if finding.kind is FindingKind.WEDGED]
        findings = wedged or findings
    sources = tuple(exporter.url for exporter in engine.exporters)
    conditions = [
        Condition(
            AlertKey(name, engine.deployment, engine.engine),
            max((finding.severity for finding in same), key=loudness),
            _summary(same),
            sources,
            incident,
        )
        for name, same in _by_name(findings)
    ]
    earliest = forecast.earliest_seconds
    if (
        forecast.outlook is Outlook.IN_SIGHT
        and earliest is not None
        and earliest <= within_seconds
        and not engine.ended
    ):
        key = AlertKey(BY_KIND["forecast"], engine.deployment, engine.engine)
        summary = _forecast_summary(forecast, earliest)
        conditions.append(Condition(key, Severity.WARNING, summary, sources, incident))
    return tuple(conditions)


def assess_exporters(
    deployment: str, engines: Iterable[EngineFacts], exporters: Iterable[ExporterFacts], now: Moment
) -> tuple[Condition, ...]:
    """
    That exporters of a deployment are out of reach of which no engine is known: what runs there is not seen at all.
    """
    known = {exporter.url for engine in engines for exporter in engine.exporters}
    silent = [exporter for exporter in exporters if exporter.url not in known and exporter.out_of_reach(now)]
    if not silent:
        return ()
    first = silent[0]
    age = first.age_seconds(now)
    ago = "has never answered" if age is None else f"last answered {seconds(age)} ago"
    more = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
    summary = f"Exporter {first.url} {ago}{more}: {first.error or 'no answer'}"
    key = AlertKey(BY_KIND[FindingKind.BLIND.value], deployment, "")
    return (Condition(key, Severity.WARNING, summary, tuple(exporter.url for exporter in silent)),)


def assess_receiver(name: str, error: str, waiting: int) -> Condition:
    """
    That a receiver does not take what is sent to it.
    """
    rest = f"; {waiting} {'notification waits' if waiting == 1 else 'notifications wait'}" if waiting else ""
    key = AlertKey(BY_KIND["receiver"], "", "", name)
    return Condition(key, Severity.WARNING, f"Alerts do not reach {name}: {error}{rest}")


def loudness(severity: Severity) -> int:
    """
    Severities in order.
    """
    return (Severity.WARNING, Severity.CRITICAL).index(severity)


def worst(one: Severity, other: Severity) -> Severity:
    """
    The louder of two.
    """
    return max(one, other, key=loudness)


def timing_of(name: str, timings: Mapping[str, Timing]) -> Timing:
    """
    Hold and keep time of an alert: those that were set, or those of its rule.
    """
    return timings.get(name) or RULES[name].timing


def labelled_kind(name: str) -> str:
    """
    What an alert is about, as a label; empty for a name that there is no more.
    """
    return RULES[name].kind if name in RULES else ""


def _by_name(findings: Iterable[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    same: dict[str, list[Finding]] = {}
    for finding in findings:
        same.setdefault(BY_KIND[finding.kind.value], []).append(finding)
    yield from same.items()


def _summary(same: Sequence[Finding]) -> str:
    first = sentence_case(same[0].sentence)
    if len(same) == 1:
        return first
    groups = joined(f"dp{rank.dp_rank}" for finding in same[1:] for rank in finding.ranks[:1])
    return f"{first} (and the like at {groups})" if groups else first


def _forecast_summary(forecast: Forecast, earliest: float) -> str:
    latest = forecast.latest_seconds
    when = (
        f"may be masked on {forecast.rank or 'a rank'} at any time from {seconds(earliest)} on"
        if latest is None or latest > OPEN_SECONDS
        else f"will be masked on {forecast.rank or 'a rank'} in {seconds(earliest)} to {seconds(latest)}"
    )
    rest = f" ({forecast.reason})" if forecast.reason else ""
    return f"All requests of a batch {when}, if traffic goes on like this{rest}"
