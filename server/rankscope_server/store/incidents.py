"""
Incidents and their captures, which must outlive the server and the engines that they are of.
"""

from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from pydantic import TypeAdapter, ValidationError

from rankscope_server.domain.incident_captures import KeptCapture
from rankscope_server.domain.incident_life import Incident
from rankscope_server.store import schema
from rankscope_server.store.store import Statement, Store

_INCIDENTS = TypeAdapter(Incident)


class IncidentStore:
    """
    Incidents and captures in the store. Every method raises StoreError and nothing else.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def save(
        self,
        incidents: Sequence[Incident],
        captures: Sequence[tuple[KeptCapture, bytes]] = (),
        removed: Sequence[tuple[str, int]] = (),
    ) -> None:
        """
        Keep incidents as they are now, captures of them, and forget some captures: all of it or nothing.

        What is there already is put there once more without harm.
        """
        table, copies = schema.incidents, schema.captures
        statements: list[Statement] = []
        if incidents:
            statements.append((sa.delete(table).where(table.c.id.in_([one.id for one in incidents])), None))
            statements.append((sa.insert(table), [_values(one) for one in incidents]))
        gone = [*((row.incident, row.number) for row, _ in captures), *removed]
        if gone:
            same = (copies.c.incident == sa.bindparam("of_incident")) & (copies.c.number == sa.bindparam("of_number"))
            keys = [{"of_incident": incident, "of_number": number} for incident, number in gone]
            statements.append((sa.delete(copies).where(same), keys))
        for row, data in captures:
            values = {"incident": row.incident, "number": row.number, "at": row.at_unix, "size": row.size_bytes, "data": data}  # fmt: skip
            statements.append((sa.insert(copies), [values]))
        if statements:
            await self._store.write(*statements)

    async def open(self) -> list[Incident]:
        """
        Incidents that are not closed, oldest first; what is not understood any more is left out.
        """
        table = schema.incidents
        query = sa.select(table.c.state).where(table.c.closed.is_(None)).order_by(table.c.opened)
        return [incident for row in await self._store.read(query) for incident in _read(row.state)]

    async def closed(self, limit: int, deployment: str | None = None) -> list[Incident]:
        """
        Incidents that are closed, newest first.
        """
        table = schema.incidents
        query = sa.select(table.c.state).where(table.c.closed.is_not(None)).order_by(table.c.opened.desc())
        if deployment is not None:
            query = query.where(table.c.deployment == deployment)
        return [incident for row in await self._store.read(query.limit(max(0, limit))) for incident in _read(row.state)]

    async def find(self, incident: str) -> Incident | None:
        """
        One incident; None where no such one is kept.
        """
        table = schema.incidents
        rows = await self._store.read(sa.select(table.c.state).where(table.c.id == incident))
        return next((found for row in rows for found in _read(row.state)), None)

    async def captures(self) -> list[KeptCapture]:
        """
        All captures that are kept, oldest first.
        """
        table, of = schema.captures, schema.incidents
        query = (
            sa.select(table.c.incident, table.c.number, table.c.at, table.c.size, of.c.closed)
            .join(of, of.c.id == table.c.incident)
            .order_by(table.c.at, table.c.incident, table.c.number)
        )
        return [KeptCapture(r.incident, r.number, r.at, r.size, r.closed) for r in await self._store.read(query)]

    async def capture(self, incident: str, number: int) -> bytes | None:
        """
        The bytes of a capture; None where it is not kept.
        """
        table = schema.captures
        query = sa.select(table.c.data).where((table.c.incident == incident) & (table.c.number == number))
        return next((bytes(row.data) for row in await self._store.read(query)), None)

    async def forget(self, before_unix: float) -> None:
        """
        Forget incidents that were closed before then, with their captures.
        """
        table, copies = schema.incidents, schema.captures
        old = sa.select(table.c.id).where(table.c.closed < before_unix)
        await self._store.write(
            (sa.delete(copies).where(copies.c.incident.in_(old)), None),
            (sa.delete(table).where(table.c.closed < before_unix), None),
        )


def _values(incident: Incident) -> dict[str, object]:
    return {
        "id": incident.id,
        "deployment": incident.deployment,
        "engine": incident.engine,
        "opened": incident.opened_unix,
        "closed": incident.closed_unix,
        "state": _INCIDENTS.dump_json(incident).decode(),
    }


def _read(state: str) -> Iterable[Incident]:
    try:
        return (_INCIDENTS.validate_json(state),)
    except ValidationError:  # of another version of the server
        return ()
