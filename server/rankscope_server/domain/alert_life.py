"""
The life of an alert: pending, firing, resolved.

Times that decide are monotonic, so that a jump of the wall clock neither fires nor resolves anything. What is not seen
changes nothing: an alert is over once it is seen to be over.
"""

import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankscope_server.domain.alert import AlertState
from rankscope_server.domain.alert_rules import AlertKey, Condition, Timing, timing_of, worst
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.model import Severity


class Change(str, enum.Enum):
    """
    What receivers are told of.
    """

    FIRING = "firing"
    WORSE = "worse"
    """It fires already, and its severity went up."""
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Alert:
    """
    One alert, from the moment that its condition held until it is resolved; if it comes back, that is another one.
    """

    id: str
    key: AlertKey
    severity: Severity
    """The worst that it was so far."""
    summary: str
    sources: tuple[str, ...]
    """Addresses of the exporters that could tell if it were over."""
    incident: str
    pending_unix: float
    held_since: float
    """Monotonic second since which its condition has held, for as long as it is pending."""
    fired_unix: float | None = None
    resolved_unix: float | None = None
    over_since: float | None = None
    """Monotonic second since which it is seen to be over; None while it holds, or is not seen."""
    told: int = 0
    """Changes that receivers were told of."""

    @property
    def state(self) -> AlertState:
        """Where it stands."""
        if self.resolved_unix is not None:
            return AlertState.RESOLVED
        return AlertState.PENDING if self.fired_unix is None else AlertState.FIRING

    def ended(self, at_unix: float) -> "Alert":
        """
        The same alert, resolved.
        """
        return dataclasses.replace(self, resolved_unix=at_unix, told=self.told + 1)


@dataclass(frozen=True, slots=True)
class Transition:
    """
    A change of an alert that receivers are told of.
    """

    change: Change
    alert: Alert
    """As it is after the change."""
    at_unix: float
    before: Severity | None = None
    """Its severity before it got worse."""


def follow(
    alerts: Mapping[AlertKey, Alert],
    conditions: Iterable[Condition],
    reached: Mapping[str, bool],
    timings: Mapping[str, Timing],
    now: Moment,
) -> tuple[dict[AlertKey, Alert], tuple[Transition, ...]]:
    """
    What becomes of the alerts of a deployment: those that are pending or firing now, and what receivers are told.

    `reached` says for every exporter of the deployment whether its last answer is fresh. An exporter that is not among
    them is watched no more, and nothing is waited for from it.
    """
    after: dict[AlertKey, Alert] = {}
    transitions: list[Transition] = []
    holding = {condition.key: condition for condition in conditions}
    for key, condition in holding.items():
        alert, transition = _holds(alerts.get(key), condition, timing_of(key.name, timings), now)
        after[key] = alert
        if transition is not None:
            transitions.append(transition)
    for key, alert in alerts.items():
        if key in holding:
            continue
        if not all(reached.get(source, True) for source in alert.sources):
            after[key] = dataclasses.replace(alert, over_since=None)
        elif alert.state is AlertState.FIRING:
            over_since = now.monotonic if alert.over_since is None else alert.over_since
            if now.monotonic - over_since < timing_of(key.name, timings).keep_seconds:
                after[key] = dataclasses.replace(alert, over_since=over_since)
            else:
                transitions.append(Transition(Change.RESOLVED, alert.ended(now.unix), now.unix))
    return after, tuple(transitions)


def _holds(known: Alert | None, condition: Condition, timing: Timing, now: Moment) -> tuple[Alert, Transition | None]:
    if known is None:
        known = Alert(
            _id_of(condition.key, now),
            condition.key,
            condition.severity,
            condition.summary,
            condition.sources,
            condition.incident,
            now.unix,
            now.monotonic,
        )
    alert = dataclasses.replace(
        known,
        severity=worst(known.severity, condition.severity),
        summary=condition.summary,
        sources=condition.sources,
        incident=condition.incident or known.incident,
        over_since=None,
    )
    if alert.state is AlertState.PENDING:
        if now.monotonic - alert.held_since < timing.hold_seconds:
            return alert, None
        alert = dataclasses.replace(alert, fired_unix=now.unix, told=alert.told + 1)
        return alert, Transition(Change.FIRING, alert, now.unix)
    if alert.severity is not known.severity:
        alert = dataclasses.replace(alert, told=alert.told + 1)
        return alert, Transition(Change.WORSE, alert, now.unix, known.severity)
    return alert, None


def restored(alert: Alert, now: Moment) -> Alert:
    """
    An alert of an earlier run of the server: its hold and keep times begin anew.
    """
    return dataclasses.replace(alert, held_since=now.monotonic, over_since=None)


def _id_of(key: AlertKey, now: Moment) -> str:
    """
    The id of an alert that begins now. Both clocks are in it: after a jump of one the other still goes on.
    """
    text = "\0".join((key.name, key.deployment, key.engine, key.subject, repr(now.unix), repr(now.monotonic)))
    return hashlib.sha256(text.encode()).hexdigest()[:24]
