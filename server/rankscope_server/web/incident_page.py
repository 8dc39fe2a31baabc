"""
What the page of an incident shows beside the incident: its engine as it is now, what was done, what to do.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rankscope_server.domain.alert import AlertsView
from rankscope_server.domain.incident import IncidentCard, IncidentView
from rankscope_server.domain.model import AuditRow, EngineView, FindingKind
from rankscope_server.domain.ports import Rankscope

AUDIT_ROWS = 200


@dataclass(frozen=True, slots=True)
class IncidentPage:
    """
    Everything that the page of an incident shows.
    """

    view: IncidentView
    engine: EngineView | None
    """None where the engine is no longer known: it has no page any more."""
    done: tuple[AuditRow, ...]
    """What was done to its engine since it opened, newest first."""
    runbook: str
    """Address of what to do about its worst finding; empty where none is known."""


async def read_incident(rankscope: Rankscope, incident: str) -> IncidentPage | None:
    """
    The page of an incident; None where no such one is known.
    """
    view = await rankscope.incident(incident)
    if view is None:
        return None
    card = view.card
    return IncidentPage(
        view=view,
        engine=rankscope.engine(card.deployment, card.engine),
        done=done_during(card, await rankscope.audit(AUDIT_ROWS, card.deployment)),
        runbook=find_runbook(card.kind, await rankscope.alerts()),
    )


def done_during(card: IncidentCard, rows: Iterable[AuditRow]) -> tuple[AuditRow, ...]:
    """
    What was done to the engine, or to its whole deployment, while the incident lasted.
    """
    return tuple(
        row
        for row in rows
        if row.engine in {"", card.engine}
        and row.at_unix >= card.opened_unix
        and (card.closed_unix is None or row.at_unix <= card.closed_unix)
    )


def find_runbook(kind: FindingKind, alerts: AlertsView) -> str:
    """
    The runbook of a kind of finding: that of any alert about it.
    """
    name = alert_name(kind)
    return next((alert.runbook for alert in (*alerts.active, *alerts.past) if alert.name == name and alert.runbook), "")


def alert_name(kind: FindingKind) -> str:
    """
    The name of the alert about a kind of finding.
    """
    return "Rankscope" + "".join(word.capitalize() for word in kind.value.split())
