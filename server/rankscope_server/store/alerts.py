"""
Alerts and the notifications of them that must outlive the server.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from pydantic import TypeAdapter, ValidationError

from rankscope_server.domain.alert_life import Alert
from rankscope_server.domain.alert_notice import Notice
from rankscope_server.domain.alert_rules import AlertKey
from rankscope_server.domain.model import Severity
from rankscope_server.store import schema
from rankscope_server.store.store import Statement, Store

WAITING, DELIVERED, GIVEN_UP = "waiting", "delivered", "given up"

_NOTICES = TypeAdapter(Notice)


@dataclass(frozen=True, slots=True)
class Settled:
    """
    What became of a notification.
    """

    id: str
    receiver: str
    delivered: bool
    at_unix: float


@dataclass(frozen=True, slots=True)
class AlertWrite:
    """
    What belongs together: an alert as it is now with what receivers are to be told of it, or what became of that.
    """

    alerts: tuple[Alert, ...] = ()
    deliveries: tuple[tuple[str, Notice], ...] = ()
    """Receiver and notice."""
    settled: tuple[Settled, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptAlerts:
    """
    What an earlier run of the server has left.
    """

    firing: tuple[Alert, ...] = ()
    waiting: tuple[tuple[str, Notice], ...] = ()
    """Receiver and notice of what was not taken, those of one alert in their order."""
    told: dict[str, frozenset[str]] = field(default_factory=dict)
    """Per alert that fires, or has notices waiting: the receivers that know of it, or will."""
    past: tuple[Alert, ...] = ()
    """Resolved ones, newest first, a few."""


class AlertStore:
    """
    Alerts and notifications in the store. Every method raises StoreError and nothing else.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def write(self, writes: Sequence[AlertWrite]) -> None:
        """
        Put all of it into the store, or nothing. What is there already is put there once more without harm.
        """
        alerts = {alert.id: alert for write in writes for alert in write.alerts}
        deliveries = {(notice.id, receiver): notice for write in writes for receiver, notice in write.deliveries}
        statements: list[Statement] = []
        if alerts:
            statements.append((sa.delete(schema.alerts).where(schema.alerts.c.id.in_(list(alerts))), None))
            statements.append((sa.insert(schema.alerts), [_alert_values(alert) for alert in alerts.values()]))
        if deliveries:
            table = schema.notifications
            same = (table.c.id == sa.bindparam("of_id")) & (table.c.receiver == sa.bindparam("of_receiver"))
            keys = [{"of_id": id_, "of_receiver": receiver} for id_, receiver in deliveries]
            statements.append((sa.delete(table).where(same), keys))
            statements.append(
                (sa.insert(table), [_notice_values(receiver, notice) for (_, receiver), notice in deliveries.items()])
            )
        statements += [_settle(settled) for write in writes for settled in write.settled]
        if statements:
            await self._store.write(*statements)

    async def kept(self, past: int) -> KeptAlerts:
        """
        What an earlier run has left, with at most `past` alerts that were resolved; what is not understood is left out.
        """
        table, notes = schema.alerts, schema.notifications
        firing = await self._store.read(sa.select(table).where(table.c.resolved.is_(None)).order_by(table.c.fired))
        resolved = await self._store.read(
            sa.select(table).where(table.c.resolved.is_not(None)).order_by(table.c.resolved.desc()).limit(past)
        )
        rows = await self._store.read(
            sa.select(notes)
            .where(
                (notes.c.outcome == WAITING)
                | (notes.c.alert.in_(sa.select(table.c.id).where(table.c.resolved.is_(None))))
            )
            .order_by(notes.c.number, notes.c.made)  # a wall clock that jumped does not turn an alert around
        )
        told: dict[str, set[str]] = {}
        waiting: list[tuple[str, Notice]] = []
        for row in rows:
            # Whoever was given up on does not know of the alert, unless it took an earlier notice of it.
            if row.outcome != GIVEN_UP:
                told.setdefault(row.alert, set()).add(row.receiver)
            if row.outcome == WAITING:
                waiting += [(row.receiver, notice) for notice in _read_notice(row.body)]
        return KeptAlerts(
            tuple(alert for row in firing for alert in _read_alert(row)),
            tuple(waiting),
            {alert: frozenset(receivers) for alert, receivers in told.items()},
            tuple(alert for row in resolved for alert in _read_alert(row)),
        )

    async def sweep(self, before_unix: float) -> None:
        """
        Forget alerts that were resolved before then, and notifications that were settled before then.
        """
        table, notes = schema.alerts, schema.notifications
        over = sa.select(table.c.id).where(table.c.resolved < before_unix)
        await self._store.write(
            (sa.delete(notes).where((notes.c.outcome != WAITING) & notes.c.alert.in_(over)), None),
            (sa.delete(table).where(table.c.resolved < before_unix), None),
            (sa.delete(notes).where((notes.c.outcome != WAITING) & notes.c.alert.not_in(sa.select(table.c.id))), None),
        )


def _alert_values(alert: Alert) -> dict[str, object]:
    return {
        "id": alert.id,
        "name": alert.key.name,
        "deployment": alert.key.deployment,
        "engine": alert.key.engine,
        "subject": alert.key.subject,
        "severity": alert.severity.value,
        "summary": alert.summary,
        "sources": json.dumps(alert.sources),
        "incident": alert.incident,
        "pending": alert.pending_unix,
        "fired": alert.fired_unix,
        "resolved": alert.resolved_unix,
        "told": alert.told,
    }


def _read_alert(row: sa.Row[Any]) -> tuple[Alert, ...]:
    try:
        severity, sources = Severity(row.severity), tuple(json.loads(row.sources))
    except ValueError:  # of another version of the server
        return ()
    key = AlertKey(row.name, row.deployment, row.engine, row.subject)
    return (
        Alert(
            id=row.id,
            key=key,
            severity=severity,
            summary=row.summary,
            sources=sources,
            incident=row.incident,
            pending_unix=row.pending,
            held_since=0.0,
            fired_unix=row.fired,
            resolved_unix=row.resolved,
            told=row.told,
        ),
    )


def _notice_values(receiver: str, notice: Notice) -> dict[str, object]:
    return {
        "id": notice.id,
        "receiver": receiver,
        "alert": notice.alert,
        "number": notice.number,
        "body": _NOTICES.dump_json(notice).decode(),
        "made": notice.at_unix,
        "outcome": WAITING,
        "settled": None,
    }


def _read_notice(body: str) -> tuple[Notice, ...]:
    try:
        return (_NOTICES.validate_json(body),)
    except ValidationError:  # of another version of the server
        return ()


def _settle(settled: Settled) -> Statement:
    table = schema.notifications
    outcome = DELIVERED if settled.delivered else GIVEN_UP
    where = (table.c.id == settled.id) & (table.c.receiver == settled.receiver)
    return sa.update(table).where(where).values(outcome=outcome, settled=settled.at_unix), None
