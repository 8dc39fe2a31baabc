"""
The exporter process's HTTP application.
"""

import asyncio
import contextlib
import html
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rankscope_exporter import __version__
from rankscope_exporter.collectors.exposition import CollectorFailures, NodeFacts, QueryError, parse_query, render
from rankscope_exporter.contract import (
    CONTROL_PATH,
    HEALTH_PATH,
    METRICS_PATH,
    RANKS_PATH,
    REQUESTS_PATH,
    STEPS_MEDIA_TYPE,
    STEPS_PATH,
    ControlCommand,
    ControlResult,
    Mitigation,
    RankLife,
)
from rankscope_exporter.flight import FlightError
from rankscope_exporter.namespaces import PROC
from rankscope_exporter.serve.access import MAY_READ, AccessCheck
from rankscope_exporter.serve.connections import Connections
from rankscope_exporter.serve.control import command_word, mitigation_named, ranks_of, refusal
from rankscope_exporter.serve.cursor import CursorError
from rankscope_exporter.serve.hosts import HostCheck, own_names
from rankscope_exporter.serve.limits import Limits
from rankscope_exporter.serve.node import Clock, Node
from rankscope_exporter.serve.private import Renewed
from rankscope_exporter.serve.ras import NcclWatch
from rankscope_exporter.serve.ras_address import parse_addresses
from rankscope_exporter.serve.rates import Rates
from rankscope_exporter.serve.settings import ServeSettings
from rankscope_exporter.serve.tls import renewed_context
from rankscope_exporter.serve.tokens import Tokens, renewed_tokens

logger = logging.getLogger("rankscope.exporter")

MAX_BODY_BYTES = 16384
"""
A control command is some two hundred bytes; whatever is longer is not one.
"""
SWEEP_SECONDS = 30.0
"""
How often flight files that have outlived their retention time are looked for.
"""
RENEWAL_SECONDS = 2.0
"""
How often files of tokens and certificates are looked at.
"""


def create_app(settings: ServeSettings, *, clock: Clock | None = None, proc: Path = PROC) -> Starlette:
    """
    The application, over the flight files of `settings.flight_dir`.

    Its state holds what whoever listens for it needs: `node`, `connections`, `tokens`, and `tls` (None where TLS is off).

    Raises:
        SettingsError: a token or a file of TLS cannot be used.

    """
    clock = Clock() if clock is None else clock
    node = Node(settings.flight_dir, clock, proc=proc)
    tokens, tls = renewed_tokens(settings), renewed_context(settings)
    renewals: list[Renewed[Any]] = [tokens] if tls is None else [tokens, tls]
    connections = Connections(settings.max_connections)

    def seconds() -> float:
        return clock.monotonic_ns() / 1e9

    nccl = NcclWatch(parse_addresses(settings.nccl_ras), settings.nccl_ras_seconds, seconds)
    handlers = _Handlers(node, tokens, connections, renewals, nccl, settings.request_seconds)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        chores = [
            asyncio.create_task(_sweep(node, settings.retention_seconds)),
            asyncio.create_task(_renew(renewals)),
        ]
        try:
            async with nccl.running():
                yield
        finally:
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            node.close()

    app = Starlette(
        routes=[
            Route("/", handlers.landing),
            Route(METRICS_PATH, handlers.metrics),
            Route(RANKS_PATH, handlers.ranks),
            Route(REQUESTS_PATH, handlers.requests),
            Route(STEPS_PATH, handlers.steps),
            Route(CONTROL_PATH, handlers.control, methods=["PUT"]),
            Route(HEALTH_PATH, handlers.health),
        ],
        middleware=[
            Middleware(
                Limits,
                rates=Rates(settings.request_rate, settings.request_burst),
                connections=connections,
                seconds=seconds,
            ),
            Middleware(HostCheck, names=own_names(settings.extra_hosts)),
            Middleware(
                AccessCheck,
                tokens=tokens,
                failures=Rates(settings.failure_rate, settings.failure_burst),
                seconds=seconds,
            ),
        ],
        exception_handlers={HTTPException: _explain},
        lifespan=lifespan,
    )
    app.state.node, app.state.connections = node, connections
    app.state.tokens, app.state.tls = tokens, tls
    return app


async def _renew(renewals: Sequence[Renewed[Any]]) -> None:
    while True:
        await asyncio.sleep(RENEWAL_SECONDS)
        for renewal in renewals:
            try:
                renewal.refresh()
            except Exception:  # noqa: PERF203  # one that fails must not keep the others from being read
                logger.exception("reading tokens and certificates anew failed")


async def _sweep(node: Node, retention_seconds: float) -> None:
    while True:
        try:
            node.remove_expired(retention_seconds)
        except Exception:
            logger.exception("looking for stale flight files failed")
        await asyncio.sleep(SWEEP_SECONDS)


async def _explain(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)


def _json(message: BaseModel, status: int = 200) -> Response:
    return Response(message.model_dump_json(), status, media_type="application/json")


def _only(request: Request, *names: str) -> None:
    """
    Refuse query parameters that would otherwise be overlooked in silence.
    """
    unknown = sorted(set(request.query_params) - set(names))
    if unknown:
        known = f"known here: {', '.join(names)}" if names else "none is known here"
        raise HTTPException(400, f"unknown query parameter {', '.join(unknown)}; {known}")


class _Handlers:
    """
    The endpoints. They run on the event loop, one at a time: each takes milliseconds and none waits for anything.
    """

    def __init__(
        self,
        node: Node,
        tokens: Renewed[Tokens],
        connections: Connections,
        renewals: Sequence[Renewed[Any]],
        nccl: NcclWatch,
        body_seconds: float,
    ) -> None:
        self._node = node
        self._tokens = tokens
        self._connections = connections
        self._renewals = renewals
        self._nccl = nccl
        self._body_seconds = body_seconds
        self._failures = CollectorFailures()

    @property
    def _control(self) -> bool:
        return self._tokens.value.control is not None

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics of all ranks, or of those that the query names."""
        try:
            query = parse_query(request.query_params.multi_items())
        except QueryError as error:
            raise HTTPException(400, str(error)) from error
        reading = self._node.read()
        facts = NodeFacts(
            self._node.name, str(self._node.directory), self._control, len(reading.unreadable), self._nccl.views()
        )
        body, media_type = render(reading.ranks, facts, query, request.headers.get("accept", ""), self._failures)
        return Response(body, headers={"content-type": media_type})

    async def ranks(self, request: Request) -> Response:
        """Every rank of the node."""
        _only(request)
        return _json(self._node.ranks(control=self._control))

    async def requests(self, request: Request) -> Response:
        """The requests that drift."""
        _only(request, "engine")
        return _json(self._node.requests(request.query_params.get("engine")))

    async def steps(self, request: Request) -> Response:
        """Step records after a cursor."""
        _only(request, "cursor")
        try:
            frame = self._node.steps(request.query_params.get("cursor"))
        except CursorError as error:
            raise HTTPException(400, str(error)) from error
        return Response(frame.encode(), media_type=STEPS_MEDIA_TYPE)

    async def control(self, request: Request) -> Response:
        """Write a control command for every rank of an engine."""
        try:
            command = await asyncio.wait_for(_command(request), self._body_seconds)
        except asyncio.TimeoutError as error:
            detail = f"the command did not come within {self._body_seconds:g} s"
            raise HTTPException(408, detail, {"Connection": "close"}) from error
        mitigation = mitigation_named(command.mitigation)
        if mitigation is None:
            known = ", ".join(m.name.lower() for m in Mitigation)
            raise HTTPException(400, f"mitigation: {command.mitigation!r} is not known; known: {known}")
        ranks = ranks_of(self._node.read().ranks, command.engine)
        keys = [rank.key for rank in ranks]
        if reason := refusal(command, mitigation, ranks):
            logger.warning(
                "control refused for engine %s, generation %d: %s", command.engine, command.generation, reason
            )
            return _json(ControlResult(accepted=False, reason=reason), 409)
        try:
            self._node.write_control(keys, command_word(command, mitigation))
        except FlightError as error:
            reason = f"the control word could not be written: {error}"
            logger.warning(
                "control failed for engine %s, generation %d: %s", command.engine, command.generation, reason
            )
            return _json(ControlResult(accepted=False, reason=reason), 503)
        logger.warning(
            "control written for engine %s: %s %s, generation %d, effective step %d, ranks %s",
            command.engine, command.mitigation, "on" if command.desired else "off", command.generation, command.effective_step, " ".join(keys),
        )  # fmt: skip
        return _json(ControlResult(accepted=True, ranks=keys))

    async def health(self, request: Request) -> Response:
        """Whether this process answers, what it can read, and what is wrong; without file names for those who may not read."""
        reading = self._node.read()
        unreadable = [{"path": file.path, "reason": file.reason} for file in reading.unreadable]
        running = sum(rank.life.value == "running" for rank in reading.ranks)
        seen = len(reading.ranks) + len(unreadable)
        problems = [renewal.problem for renewal in self._renewals if renewal.problem]
        if unknown := sum(rank.life is RankLife.UNKNOWN for rank in reading.ranks):
            problems.append(
                f"whether {unknown} ranks live is unknown: let this exporter share vLLM's process namespace"
            )
        if self._connections.crowded:
            problems.append(f"more than {self._connections.limit} connections are busy: others are answered with 503")
        answer: dict[str, Any] = {
            "status": "degraded" if problems else "ok",
            "ranks": {"seen": seen, "readable": len(reading.ranks), "running": running},
        }
        if request.scope[MAY_READ]:
            answer |= {"unreadable": unreadable, "problems": problems, "nccl": self._nccl.health()}
        return JSONResponse(answer)

    async def landing(self, request: Request) -> Response:
        """A page for people who open the port in a browser."""
        if request.scope[MAY_READ]:
            count, directory = len(self._node.read().ranks), html.escape(str(self._node.directory))
            about = f"Ranks in <code>{directory}</code>: {count}"
        else:
            about = "Answers take this exporter's read token, as <code>Authorization: Bearer TOKEN</code>."
        links = "".join(f'<li><a href="{path}">{path}</a> {what}</li>' for path, what in _LINKS)
        page = _PAGE.format(about=about, version=__version__, links=links)
        headers = {
            "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
        }
        return HTMLResponse(page, headers=headers)


async def _command(request: Request) -> ControlCommand:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            detail = f"a control command has at most {MAX_BODY_BYTES} bytes"
            raise HTTPException(413, detail, {"Connection": "close"})
    try:
        return ControlCommand.model_validate_json(body)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False)
        )
        raise HTTPException(400, problems) from error


_LINKS = (
    (METRICS_PATH, "metrics for Prometheus"),
    (RANKS_PATH, "ranks, hooks and mitigations (JSON)"),
    (REQUESTS_PATH, "requests that drift (JSON)"),
    (HEALTH_PATH, "health of this process (JSON)"),
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rankscope-exporter</title></head>
<body><h1>rankscope-exporter {version}</h1><p>{about}</p><ul>{links}</ul></body></html>
"""
