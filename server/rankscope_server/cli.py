"""
The command `rankscope`.
"""

import os
import socket
import sys
import webbrowser
from pathlib import Path
from typing import Annotated, Any, NoReturn

import anyio
import structlog
import typer
import uvicorn

from rankscope_server import __version__
from rankscope_server.alerting.create import create_links
from rankscope_server.app import create_app
from rankscope_server.auth import password_line, read_passwords
from rankscope_server.commands.alert import alert
from rankscope_server.commands.replay import replay
from rankscope_server.domain.model import Severity
from rankscope_server.ingest.access import create_auth, create_tls_context
from rankscope_server.notify.create import create_receivers
from rankscope_server.settings import ConfigError, ServerSettings, describe_links, load_settings
from rankscope_server.store import StoreError, StoreVersionError, open_store

cli = typer.Typer(
    name="rankscope",
    help="Dashboard and canary control for vLLM with pipeline parallelism: drift across ranks, live.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with deployments and settings.")]
Target = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        "-t",
        help="A deployment: name=url[,url...][,role=baseline|canary][,token-file=PATH]. Can be repeated. "
        "Also read-token-file=, ca-file=, client-cert-file= and client-key-file=, as the exporters ask for them.",
    ),
]


def _fail(message: str) -> NoReturn:
    for line in message.splitlines():
        print(f"rankscope: {line}", file=sys.stderr)  # noqa: T201  this is the interface
    raise typer.Exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rankscope {__version__}")
        raise typer.Exit


@cli.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


@cli.command()
def serve(
    config: Config = None,
    target: Target = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; anything but loopback needs --password-file. [127.0.0.1]")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one. [8700]")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name under which browsers reach the server, such as that of a proxy.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the store lies. [the user's data directory]")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL of the store, instead of SQLite in the data directory.")
    ] = None,
    password_file: Annotated[
        Path | None, typer.Option(help="Users who may sign in: lines made by `rankscope password NAME`.")
    ] = None,
    alertmanager: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of an Alertmanager that gets every alert, like http://127.0.0.1:9093. Can be repeated."
        ),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the dashboard in a browser.")] = False,
) -> None:
    """
    Watch deployments and serve the dashboard.
    """
    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "allowed_hosts": tuple(allowed_host) if allowed_host else None,
        "data_dir": data_dir,
        "database_url": database_url,
        "password_file": password_file,
        "alertmanagers": tuple(alertmanager) if alertmanager else None,
    }
    try:
        settings = load_settings(config, target or (), flags)
        app = create_app(settings)
        anyio.run(_check_store, settings.store_url)
    except (ConfigError, StoreVersionError) as error:
        _fail(str(error))
    listener = _listen(settings)
    _configure_logs()
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    url = f"http://{shown}:{address[1]}/"
    watched = (
        ", ".join(deployment.name for deployment in settings.deployments)
        or "no deployment yet (add one with --target name=http://host:9610)"
    )
    print(f"Rankscope {__version__} on {url} watches {watched}", flush=True)  # noqa: T201  this is the interface
    if links := describe_links(settings):
        print(links, flush=True)  # noqa: T201  this is the interface
    server = _Server(
        uvicorn.Config(app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=3),
        app.state.service.board.close,
    )
    if open_browser:
        webbrowser.open(url)
    server.run(sockets=[listener])
    if not server.started:
        _fail("the server could not start; the lines above say why")


async def _check_store(url: str) -> None:
    """
    Refuse a store that a newer server made. Whatever else is wrong with it, the server watches, and says so.
    """
    try:
        store = await open_store(url)
    except StoreVersionError:
        raise
    except StoreError as error:
        print(f"rankscope: {error}; watching goes on without it", file=sys.stderr)  # noqa: T201  this is the interface
        return
    await store.close()


class _Server(uvicorn.Server):
    """
    Ends live streams as soon as a signal says so: they would hold the shutdown up otherwise.
    """

    def __init__(self, config: uvicorn.Config, closing: Any) -> None:
        super().__init__(config)
        self._closing = closing

    def handle_exit(self, sig: int, frame: Any) -> None:
        """
        As uvicorn, and tell the streams.
        """
        self._closing()
        super().handle_exit(sig, frame)


def _listen(settings: ServerSettings) -> socket.socket:
    """
    The listening socket; made before anything else is started, so that a port in use is said plainly.
    """
    host = settings.host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        if isinstance(error, socket.gaierror):
            _fail(f"{settings.host} is no address of this machine: {error.strerror}")
        remedy = {
            98: "another server is there; end it, or take another port with --port",
            13: "take a port above 1023 with --port",
            99: "take an address of this machine with --host",
        }
        _fail(
            f"cannot listen on {settings.host}:{settings.port}: {os.strerror(error.errno or 0)}; {remedy.get(error.errno or 0, 'take another with --port')}"
        )
    return listener


def _configure_logs() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


@cli.command()
def password(
    name: Annotated[str, typer.Argument(help="User name.")],
) -> None:
    """
    Print a line for the password file; asks for the password (or reads it from standard input, if that is no terminal).
    """
    if sys.stdin.isatty():
        secret = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        secret = sys.stdin.readline().rstrip("\n")
    try:
        typer.echo(password_line(name, secret))
    except ConfigError as error:
        _fail(str(error))


@cli.command("check-config")
def check_config(
    config: Annotated[Path | None, typer.Argument(help="YAML file to check.")] = None,
    target: Target = None,
) -> None:
    """
    Check settings, token files, receivers of alerts and the password file, and say what would be watched.
    """
    try:
        settings = load_settings(config, target or ())
        if settings.password_file is not None:
            read_passwords(settings.password_file)
        for deployment in settings.deployments:
            create_tls_context(deployment)
            has_token = create_auth(deployment).control.value is not None
            control = "can be toggled" if has_token else "read only: no control token"
            typer.echo(f"{deployment.name} ({deployment.role.value}, {control}): {', '.join(deployment.exporters)}")
        for receiver, route in create_receivers(settings.receivers, create_links(settings)):
            severities = " and ".join(severity.value for severity in Severity if severity in route.severities)
            of = f" of {', '.join(sorted(route.deployments))}" if route.deployments else ""
            typer.echo(f"alerts ({severities}{of}) go to {receiver.name}: {receiver.kind}, {receiver.where}")
        if links := describe_links(settings):
            typer.echo(links)
    except ConfigError as error:
        _fail(str(error))
    if not settings.deployments:
        typer.echo("no deployment yet: add one under `deployments:`")


cli.command()(replay)
cli.add_typer(alert)


def main() -> None:
    """
    The console script.
    """
    cli()
