"""
Listening: the socket, uvicorn, the line that says where.
"""

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn

from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.node import Node
from rankscope_exporter.serve.settings import ServeSettings, SettingsError

logger = logging.getLogger("rankscope.exporter")

SHUTDOWN_SECONDS = 1
"""
How long answers that are under way may take once the process is asked to end.
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


def url_of(listener: socket.socket) -> str:
    """
    The URL of a listening socket.
    """
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """
    A uvicorn server that says where it serves once it does.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """
        Start, then announce.
        """
        await super().startup(sockets=sockets)
        if self.started:
            self._announce()


def create_server(settings: ServeSettings, listener: socket.socket) -> Server:
    """
    The server of the application, not yet running.

    Raises:
        SettingsError: a setting cannot be used.

    """
    app = create_app(settings)
    config = uvicorn.Config(
        app, loop="asyncio", log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )  # fmt: skip

    def announce() -> None:
        node: Node = app.state.node
        say(start_line(len(node.read().ranks), settings, url_of(listener)))

    return Server(config, announce)


def start_line(ranks: int, settings: ServeSettings, url: str) -> str:
    """
    What is said once the server listens.
    """
    line = f"serving {ranks} rank{'' if ranks == 1 else 's'} of {settings.flight_dir} on {url}"
    return line if settings.loopback else f"{line} (anyone who reaches this address can read; control takes the token)"


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
