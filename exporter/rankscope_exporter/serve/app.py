"""
The exporter process's HTTP application.
"""

import asyncio
import contextlib
import hmac
import html
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rankscope_exporter import __version__
from rankscope_exporter.collectors.exposition import NodeFacts, QueryError, parse_query, render
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
)
from rankscope_exporter.flight import FlightError
from rankscope_exporter.serve.control import command_word, mitigation_named, ranks_of, refusal
from rankscope_exporter.serve.cursor import CursorError
from rankscope_exporter.serve.hosts import HostCheck, own_names
from rankscope_exporter.serve.node import Clock, Node
from rankscope_exporter.serve.process import PROC
from rankscope_exporter.serve.settings import ServeSettings, read_control_token

logger = logging.getLogger("rankscope.exporter")

MAX_BODY_BYTES = 16384
"""
A control command is some two hundred bytes; whatever is longer is not one.
"""
SWEEP_SECONDS = 30.0
"""
How often flight files that have outlived their retention time are looked for.
"""


def create_app(settings: ServeSettings, *, clock: Clock | None = None, proc: Path = PROC) -> Starlette:
    """
    The application, over the flight files of `settings.flight_dir`.

    Raises:
        SettingsError: the control token cannot be used.

    """
    node = Node(settings.flight_dir, Clock() if clock is None else clock, proc=proc)
    handlers = _Handlers(node, read_control_token(settings))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(_sweep(node, settings.retention_seconds))
        try:
            yield
        finally:
            sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeper
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
        middleware=[Middleware(HostCheck, names=own_names(settings.extra_hosts))],
        exception_handlers={HTTPException: _explain},
        lifespan=lifespan,
    )
    app.state.node = node
    return app


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

    def __init__(self, node: Node, token: str | None) -> None:
        self._node = node
        self._token = token

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics of all ranks, or of those that the query names."""
        try:
            query = parse_query(request.query_params.multi_items())
        except QueryError as error:
            raise HTTPException(400, str(error)) from error
        reading = self._node.read()
        facts = NodeFacts(self._node.name, str(self._node.directory), self._token is not None, len(reading.unreadable))
        body, media_type = render(reading.ranks, facts, query, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": media_type})

    async def ranks(self, request: Request) -> Response:
        """Every rank of the node."""
        _only(request)
        return _json(self._node.ranks(control=self._token is not None))

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
        self._authorize(request)
        command = await _command(request)
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

    def _authorize(self, request: Request) -> None:
        if self._token is None:
            detail = "control is off: start the exporter with --control-token-file FILE or RANKSCOPE_CONTROL_TOKEN to turn it on"
            raise HTTPException(403, detail)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            detail = "send this exporter's control token as `Authorization: Bearer TOKEN`"
            raise HTTPException(401, detail, {"WWW-Authenticate": "Bearer"})

    async def health(self, _: Request) -> Response:
        """Whether this process answers, and what it can read."""
        reading = self._node.read()
        unreadable = [{"path": file.path, "reason": file.reason} for file in reading.unreadable]
        running = sum(rank.life.value == "running" for rank in reading.ranks)
        seen = len(reading.ranks) + len(unreadable)
        return JSONResponse(
            {
                "status": "ok",
                "ranks": {"seen": seen, "readable": len(reading.ranks), "running": running},
                "unreadable": unreadable,
            }
        )

    async def landing(self, _: Request) -> Response:
        """A page for people who open the port in a browser."""
        ranks = self._node.read().ranks
        links = "".join(f'<li><a href="{path}">{path}</a> {what}</li>' for path, what in _LINKS)
        page = _PAGE.format(
            count=len(ranks), directory=html.escape(str(self._node.directory)), version=__version__, links=links
        )
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
            raise HTTPException(413, f"a control command has at most {MAX_BODY_BYTES} bytes")
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
<body><h1>rankscope-exporter {version}</h1><p>Ranks in <code>{directory}</code>: {count}</p><ul>{links}</ul></body></html>
"""
