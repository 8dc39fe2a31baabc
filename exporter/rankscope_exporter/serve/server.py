"""
Listening: the socket, uvicorn, the line that says where.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from rankscope_exporter.serve.accept import Acceptor
from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.connections import Connection, Patience
from rankscope_exporter.serve.limits import MAX_HEAD_BYTES
from rankscope_exporter.serve.node import Node
from rankscope_exporter.serve.settings import ServeSettings, SettingsError
from rankscope_exporter.serve.tokens import Tokens

logger = logging.getLogger("rankscope.exporter")

SHUTDOWN_SECONDS = 1
"""
How long answers that are under way may take once the process is asked to end.
"""
ANSWER_SECONDS = 30.0
"""
How long a client may take to receive an answer that is ready.
"""


def bind(settings: ServeSettings) -> socket.socket:
    """
    A socket that listens at the address of the settings.

    Raises:
        SettingsError: the address cannot be had; the message says what to do.

    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        msg = f"host {settings.host!r} cannot be resolved: {error.strerror}"
        raise SettingsError(msg) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        remedy = "; choose another with --port, or end what listens there (`ss -ltnp`)" if settings.port else ""
        msg = f"cannot listen on {settings.host} port {settings.port}: {error.strerror}{remedy}"
        raise SettingsError(msg) from error
    return listener


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """
    The URL of a listening socket.
    """
    scheme = "https" if tls else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Server(uvicorn.Server):
    """
    A uvicorn server that accepts connections in its own way, and says where it serves once it does.
    """

    def __init__(
        self, config: uvicorn.Config, settings: ServeSettings, app: Starlette, announce: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._settings = settings
        self._app = app
        self._announce = announce
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """
        Start, then announce.
        """
        await super().startup(sockets=[])
        if not self.started:
            return
        for listener in sockets or []:
            acceptor = Acceptor(listener, self._connection, self._app.state.tls, self._settings.request_seconds)
            task = asyncio.create_task(acceptor.run())
            task.add_done_callback(self._accepted)
            self._accepting.append(task)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """
        Accept nothing more, then end.
        """
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets=sockets)

    def _connection(self) -> Connection:
        settings = self._settings
        return Connection(
            self.config,
            self.server_state,
            self.lifespan.state,
            connections=self._app.state.connections,
            patience=Patience(settings.request_seconds, settings.keep_alive_seconds, ANSWER_SECONDS),
        )

    def _accepted(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # A process that listens and never answers looks alive: better that it ends and is started anew.
            logger.critical("accepting connections failed", exc_info=error)
            self.should_exit = True


def create_server(settings: ServeSettings, listener: socket.socket) -> Server:
    """
    The server of the application, not yet running.

    Raises:
        SettingsError: a setting cannot be used.

    """
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",  # the one whose connections we know how to limit
        ws="none",
        log_level="error",  # below, a client can fill the log
        access_log=False,
        server_header=False,
        proxy_headers=False,  # rates go by the address that connected, which a header could make up
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=settings.keep_alive_seconds,  # type: ignore[arg-type]  # it goes to `call_later`, which takes parts of seconds
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )

    def announce() -> None:
        node: Node = app.state.node
        url = url_of(listener, tls=app.state.tls is not None)
        say(start_line(len(node.read().ranks), settings, url))
        for warning in exposure(settings, app.state.tokens.value):
            say(f"warning: {warning}")

    return Server(config, settings, app, announce)


def start_line(ranks: int, settings: ServeSettings, url: str) -> str:
    """
    What is said once the server listens.
    """
    return f"serving {ranks} rank{'' if ranks == 1 else 's'} of {settings.flight_dir} on {url}"


def exposure(settings: ServeSettings, tokens: Tokens) -> list[str]:
    """
    What others can do because of where this listens and how, each with its remedy.

    It is said and not refused: a network of its own for such traffic is as good, and only the operator knows it.
    """
    if settings.loopback:
        return []
    warnings = []
    if settings.tls_cert_file is None:
        readable = "answers and tokens" if tokens.read or tokens.control else "answers"
        warnings.append(
            f"{settings.host} is not loopback and TLS is off: {readable} can be read on the way; set --tls-cert-file and --tls-key-file"
        )
    if tokens.read is None and settings.tls_client_ca_file is None:
        warnings.append(
            f"{settings.host} is not loopback and takes no token: anyone who reaches this address can read; set --read-token-file or --tls-client-ca-file"
        )
    return warnings


def say(line: str) -> None:
    """
    Say something to whoever started this process. Standard output stays free for the child of `run`.
    """
    print(line, file=sys.stderr, flush=True)  # noqa: T201  # the command's own words


def serve(settings: ServeSettings) -> int:
    """
    Serve until SIGTERM or SIGINT; the exit code.

    Raises:
        SettingsError: a setting cannot be used.

    """
    with bind(settings) as listener:
        server = create_server(settings, listener)
        # uvicorn raises the signal again after its clean end; with handlers of our own that is not an error exit.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        server.run(sockets=[listener])
    return 0 if server.started else 1


def _ignore(*_: object) -> None:
    """
    The signal has done its work already.
    """


def run_in_thread(server: Server, listener: socket.socket) -> None:
    """
    Serve in a thread that is not the main one, until `server.should_exit`; a failure is logged and no more.
    """
    try:
        with contextlib.closing(listener):
            server.run(sockets=[listener])
    except BaseException:  # what is beside us is vLLM: it goes on
        logger.exception("serving failed; the command goes on without it")
