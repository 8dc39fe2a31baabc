"""
Puts the server together.
"""

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio
import httpx2
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware import Middleware

from rankscope_server import __version__, web
from rankscope_server.alerting.create import create_desk
from rankscope_server.alerting.telemetry import AlertCollector
from rankscope_server.auth import BasicAuth, HostCheck, OriginCheck, SecurityHeaders, checked_names, read_passwords
from rankscope_server.control.board import Board
from rankscope_server.control.reports import Reports
from rankscope_server.control.service import Service
from rankscope_server.incidents.desk import IncidentDesk
from rankscope_server.ingest.access import RenewedTls, create_auth
from rankscope_server.ingest.client import create_client
from rankscope_server.ingest.clock import Clock, SystemClock
from rankscope_server.ingest.poller import Poller
from rankscope_server.ingest.tracks import ExporterTrack, Fleet
from rankscope_server.runbooks import install_runbooks, runbooks_dir
from rankscope_server.settings import ServerSettings
from rankscope_server.store import open_store
from rankscope_server.telemetry import ServerCollector

PACKAGE = Path(__file__).parent


def templates_dir() -> Path:
    """
    Where the page templates are: in the installed package, or beside it in a source tree.
    """
    installed = PACKAGE / "templates"
    return installed if installed.is_dir() else PACKAGE.parent.parent / "templates"


def create_service(
    settings: ServerSettings, *, clock: Clock, transport: httpx2.AsyncBaseTransport | None = None
) -> Service:
    """
    The server without its pages.

    Raises:
        ConfigError: a token or a file of TLS cannot be used.

    """
    fleet = Fleet()
    roles = {deployment.name: deployment.role for deployment in settings.deployments}

    def changed() -> None:
        board.bump()

    incidents = IncidentDesk(clock, retention_seconds=settings.retention_days * 86400)
    reports = Reports(incidents, create_desk(settings, clock=clock, changed=changed), tuple(roles))
    board = Board(fleet, roles, clock, reports)
    clients: dict[str, httpx2.AsyncClient] = {}
    pollers: list[Poller] = []
    service = Service(
        board,
        pollers,
        clients,
        clock,
        open_store=partial(open_store, settings.store_url),
        retention_seconds=settings.retention_days * 86400,
    )
    since = clock.now().monotonic
    for deployment in settings.deployments:
        tls = RenewedTls(deployment)
        auth = create_auth(deployment, tls)
        client = create_client(transport, auth=auth, tls=tls.context)
        for url in deployment.exporters:
            clients[url] = client
            track = ExporterTrack(deployment.name, url, auth.control.value is not None, since)
            fleet.add(track)
            pollers.append(
                Poller(
                    track, client, clock, changed=service.note_change, drifts=board.drifts, period=settings.poll_seconds
                )
            )
    return service


def create_app(
    settings: ServerSettings, *, clock: Clock | None = None, transport: httpx2.AsyncBaseTransport | None = None
) -> FastAPI:
    """
    The application. `transport` reaches the exporters; `clock` is what all waiting and dating goes by.

    Raises:
        ConfigError: a token, a file of TLS or the password file cannot be used.

    """
    service = create_service(settings, clock=clock or SystemClock(), transport=transport)
    passwords = read_passwords(settings.password_file) if settings.password_file is not None else None
    names = checked_names(settings.host, settings.allowed_hosts, passwords)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.run)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
        await service.close()

    checks = [
        Middleware(SecurityHeaders),
        *([Middleware(HostCheck, names=names)] if names is not None else []),
        Middleware(BasicAuth, passwords=passwords),
        Middleware(OriginCheck),
    ]
    app = FastAPI(
        title="Rankscope",
        version=__version__,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=checks,
    )
    app.state.service = service
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(service.board, service.pollers))
    registry.register(AlertCollector(service.board.reports.alerts))
    _add_operations(app, service, registry)
    install_runbooks(app, runbooks_dir())
    web.install(app, service, templates_dir=templates_dir(), static_dir=PACKAGE / "static")
    return app


def _add_operations(app: FastAPI, service: Service, registry: CollectorRegistry) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def health() -> dict[str, object]:
        """
        That the server answers, and what is wrong with it.
        """
        problems = list(service.board.all_problems())
        return {"ok": not problems, "problems": problems, "exporters": len(service.pollers), "version": __version__}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """
        The server's own metrics.
        """
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


__all__ = ["create_app", "create_service"]
