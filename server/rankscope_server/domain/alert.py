"""
Alerts and their receivers: the values that pages and API show.
"""

import enum
from dataclasses import dataclass

from rankscope_server.domain.model import Severity


class AlertState(str, enum.Enum):
    """
    Where an alert stands.
    """

    PENDING = "pending"
    """Its condition holds, and not yet for as long as it must."""
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class AlertView:
    """
    An alert, from the moment that its condition first held.
    """

    name: str
    """CamelCase, as the rules for Prometheus have it: `RankscopeGuardDisagreement`."""
    deployment: str
    engine: str
    """Empty where the alert is about a deployment."""
    state: AlertState
    severity: Severity
    summary: str
    pending_unix: float
    fired_unix: float | None
    resolved_unix: float | None
    page: str
    """Path of the page that shows it."""
    runbook: str
    """Address of what to do; empty where none is set."""
    incident: str = ""
    """Id of the incident that it is of; empty where there is none."""


@dataclass(frozen=True, slots=True)
class ReceiverView:
    """
    How a receiver of alerts takes what is sent to it.
    """

    name: str
    kind: str
    """`alertmanager`, `webhook` or `apprise`."""
    where: str
    """Its address without secrets."""
    healthy: bool | None
    """None while nothing has been sent."""
    error: str
    """Why the last delivery failed, with the remedy; empty if it did not."""
    delivered: int
    """Notifications that it took, since the server started."""
    waiting: int
    """Notifications that it has not taken yet."""
    given_up: int
    """Notifications that were not delivered in time and will not be any more."""
    last_delivered_unix: float | None
    failing_since_unix: float | None


@dataclass(frozen=True, slots=True)
class AlertsView:
    """
    Everything that the alerts page shows.
    """

    active: tuple[AlertView, ...]
    """Firing ones first, then pending ones; the worst first."""
    past: tuple[AlertView, ...]
    """Resolved ones, newest first, as many as a page shows."""
    receivers: tuple[ReceiverView, ...]
