"""
The store: what must outlive the server. SQLite in the data directory unless a URL says otherwise.
"""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from anyio import CancelScope
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from rankscope_server.domain.model import AuditRow, Finding, FindingKind, RankId, Severity
from rankscope_server.store import schema
from rankscope_server.store.rows import DesiredRow, SampleRow

TRIM = "trim"

Statement = tuple[sa.Executable, list[dict[str, Any]] | None]
"""
What is executed, with the values for each time that it is; None: once, without values.
"""


class StoreError(Exception):
    """
    The store cannot be opened, read or written; the message names the remedy.
    """


class StoreVersionError(StoreError):
    """
    A newer server has made the store.
    """


class Store:
    """
    Desired state, audit, samples and findings. Every method raises StoreError and nothing else.

    What was begun is finished although its caller is cancelled: a connection that is given up half way leaves a thread
    behind that the process waits for as it ends.
    """

    def __init__(self, engine: AsyncEngine, where: str) -> None:
        self._engine = engine
        self._where = where

    async def close(self) -> None:
        """
        Let go of every connection.
        """
        with CancelScope(shield=True):
            await self._engine.dispose()

    async def desired(self) -> list[DesiredRow]:
        """
        All that operators asked for.
        """
        table = schema.desired
        rows = await self.read(sa.select(table).where(table.c.mitigation == TRIM))
        return [DesiredRow(r.deployment, r.engine, bool(r.desired), r.generation, r.actor, r.at) for r in rows]

    async def save_toggle(self, row: DesiredRow, audit: AuditRow) -> None:
        """
        Note what was asked for and who asked, both or neither. What is said about the whole deployment undoes what
        was said about single engines of it before.
        """
        table = schema.desired
        same = (table.c.deployment == row.deployment) & (table.c.mitigation == TRIM)
        gone = same if not row.engine else same & (table.c.engine == row.engine)
        values = {
            "deployment": row.deployment,
            "engine": row.engine,
            "mitigation": TRIM,
            "desired": row.desired,
            "generation": row.generation,
            "actor": row.actor,
            "at": row.at_unix,
        }
        await self.write(
            (sa.delete(table).where(gone), None),
            (sa.insert(table), [values]),
            (sa.insert(schema.audit), [_audit_values(audit, row.generation)]),
        )

    async def save_generation(self, row: DesiredRow) -> None:
        """
        Note that a newer generation carries what was asked for.
        """
        table = schema.desired
        where = (table.c.deployment == row.deployment) & (table.c.engine == row.engine) & (table.c.mitigation == TRIM)
        await self.write((sa.update(table).where(where).values(generation=row.generation), None))

    async def add_audit(self, row: AuditRow, generation: int = 0) -> None:
        """
        Note one thing that was done.
        """
        await self.write((sa.insert(schema.audit), [_audit_values(row, generation)]))

    async def audit(self, limit: int, deployment: str | None = None) -> list[AuditRow]:
        """
        What was done, newest first.
        """
        table = schema.audit
        query = sa.select(table).order_by(table.c.id.desc()).limit(max(0, limit))
        if deployment is not None:
            query = query.where(table.c.deployment == deployment)
        return [
            AuditRow(r.at, r.actor, r.deployment, r.engine, r.action, r.detail, r.outcome)
            for r in await self.read(query)
        ]

    async def acknowledged(self) -> set[tuple[str, int]]:
        """
        Engine and generation of every command whose outcome was noted.
        """
        table = schema.audit
        rows = await self.read(
            sa.select(table.c.engine, table.c.generation).where(
                (table.c.action == "acknowledged") & (table.c.generation > 0)
            )
        )
        return {(r.engine, r.generation) for r in rows}

    async def add_samples(self, rows: Sequence[SampleRow]) -> None:
        """
        Keep samples; one that is there already stays.
        """
        values = [
            {
                "deployment": row.deployment,
                "engine": row.engine,
                "dp_rank": row.rank.dp_rank,
                "pp_rank": row.rank.pp_rank,
                "tp_rank": row.rank.tp_rank,
                "second": row.second,
                "drift_max": row.drift_max,
                "state_max": row.state_max,
                "steps": row.steps,
                "requests": row.requests,
            }
            for row in rows
        ]
        if values:
            await self.write((_insert_new(self._engine, schema.samples), values))

    async def samples(self, deployment: str, engine: str, since: int, until: int) -> list[SampleRow]:
        """
        Samples of an engine from second `since` on, up to `until`, oldest first.
        """
        table = schema.samples
        query = (
            sa.select(table)
            .where(
                (table.c.deployment == deployment)
                & (table.c.engine == engine)
                & (table.c.second >= since)
                & (table.c.second < until)
            )
            .order_by(table.c.second)
        )
        return [
            SampleRow(
                r.deployment,
                r.engine,
                RankId(r.dp_rank, r.pp_rank, r.tp_rank),
                r.second,
                r.drift_max,
                r.state_max,
                r.steps,
                r.requests,
            )
            for r in await self.read(query)
        ]

    async def remove_samples(self, before: int) -> None:
        """
        Forget samples older than second `before`.
        """
        await self.write((sa.delete(schema.samples).where(schema.samples.c.second < before), None))

    async def open_finding(self, deployment: str, engine: str, finding: Finding, at_unix: float) -> None:
        """
        Note a finding that opened.
        """
        values = {
            "deployment": deployment,
            "engine": engine,
            "kind": finding.kind.value,
            "severity": finding.severity.value,
            "sentence": finding.sentence,
            "step": finding.step,
            "ranks": ", ".join(rank.label for rank in finding.ranks),
            "since": finding.since_unix,
            "found": finding.found_unix or at_unix,
            "closed": None,
        }
        await self.write((sa.insert(schema.findings), [values]))

    async def close_finding(self, deployment: str, engine: str, kind: str, at_unix: float) -> None:
        """
        Note that a finding closed.
        """
        table = schema.findings
        where = (
            (table.c.deployment == deployment)
            & (table.c.engine == engine)
            & (table.c.kind == kind)
            & table.c.closed.is_(None)
        )
        await self.write((sa.update(table).where(where).values(closed=at_unix), None))

    async def open_findings(self) -> list[tuple[str, str, Finding]]:
        """
        Findings that have not closed, with deployment and engine; what is not understood any more is left out.
        """
        found = []
        for r in await self.read(sa.select(schema.findings).where(schema.findings.c.closed.is_(None))):
            with contextlib.suppress(ValueError):
                ranks = tuple(_rank_of(label) for label in r.ranks.split(", ") if label)
                kind, severity = FindingKind(r.kind), Severity(r.severity)
                finding = Finding(kind, severity, r.sentence, r.step, ranks, r.since, open=True, found_unix=r.found)
                found.append((r.deployment, r.engine, finding))
        return found

    async def read(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """
        The rows of a query. For the parts of the store that have a file of their own.
        """
        try:
            with CancelScope(shield=True):
                async with self._engine.connect() as connection:
                    rows: Sequence[sa.Row[Any]] = (await connection.execute(query)).all()
        except (SQLAlchemyError, OSError) as error:
            raise self._explained(error) from error
        return rows

    async def write(self, *statements: Statement) -> None:
        """
        Execute statements in order, all or none of them.
        """
        try:
            with CancelScope(shield=True):
                async with self._engine.begin() as connection:
                    for statement, values in statements:
                        await connection.execute(statement, values)
        except (SQLAlchemyError, OSError) as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> StoreError:
        return StoreError(_explain(error, self._where))


def _rank_of(label: str) -> RankId:
    match = re.fullmatch(r"dp(\d+) pp(\d+) tp(\d+)", label)
    if match is None:
        raise ValueError(label)
    return RankId(*(int(number) for number in match.groups()))


def _insert_new(engine: AsyncEngine, table: sa.Table) -> sa.Executable:
    if engine.dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    from sqlalchemy.dialects import postgresql  # noqa: PLC0415  only where it is used

    return postgresql.insert(table).on_conflict_do_nothing()


def _audit_values(row: AuditRow, generation: int) -> dict[str, Any]:
    return {
        "at": row.at_unix,
        "actor": row.actor,
        "deployment": row.deployment,
        "engine": row.engine,
        "action": row.action,
        "detail": row.detail,
        "outcome": row.outcome,
        "generation": generation,
    }


def _explain(error: Exception, where: str) -> str:
    text = str(getattr(error, "orig", None) or error).splitlines()[0]
    remedy = "see that it is there and can be written"
    if "disk is full" in text:
        remedy = "make room on its disk"
    elif "readonly" in text or "read-only" in text:
        remedy = "make it writable for the user that runs the server"
    elif "locked" in text:
        remedy = "another process holds it: run one server per data directory"
    elif "malformed" in text or "not a database" in text:
        remedy = "it is damaged: move it away and start again, or restore a copy"
    return f"store {where}: {text}; {remedy}"


async def open_store(url: str) -> Store:
    """
    Open the store, and make its tables where they are missing.

    Raises:
        StoreError: it cannot be opened, or a newer server has made it.

    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        msg = (
            f"database URL {url!r} is not understood: write it like sqlite+aiosqlite:////var/lib/rankscope/rankscope.db"
        )
        raise StoreError(msg) from error
    where = parsed.render_as_string(hide_password=True)
    if parsed.get_backend_name() == "sqlite" and parsed.database not in {None, "", ":memory:"}:
        where = str(parsed.database)
        await asyncio.to_thread(_make_directory, Path(where).parent, where)
    try:
        engine = create_async_engine(parsed)
    except (SQLAlchemyError, ImportError) as error:
        msg = f"database URL {where}: {error}; install the driver that it names, or use sqlite+aiosqlite"
        raise StoreError(msg) from error
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine.sync_engine, "connect", _set_pragmas)
    try:
        with CancelScope(shield=True):
            async with engine.begin() as connection:
                await _migrate(connection, where)
    except (SQLAlchemyError, OSError) as error:
        with contextlib.suppress(SQLAlchemyError):
            await engine.dispose()
        raise StoreError(_explain(error, where)) from error
    except StoreError:
        await engine.dispose()
        raise
    return Store(engine, where)


def _make_directory(directory: Path, where: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        msg = f"store {where}: {error.strerror}; name a directory that can be written with --data-dir"
        raise StoreError(msg) from error


def _set_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=3000")
    cursor.close()


async def _migrate(connection: AsyncConnection, where: str) -> None:
    await connection.run_sync(schema.meta.create, checkfirst=True)
    found = (
        await connection.execute(sa.select(schema.meta.c.value).where(schema.meta.c.key == "version"))
    ).scalar_one_or_none()
    if found is not None and int(found) > schema.VERSION:
        msg = f"store {where} was made by a newer server (version {found}, this one knows {schema.VERSION}): upgrade the server, or use another --data-dir"
        raise StoreVersionError(msg)
    await connection.run_sync(schema.metadata.create_all)
    if found is None:
        await connection.execute(sa.insert(schema.meta), [{"key": "version", "value": str(schema.VERSION)}])
