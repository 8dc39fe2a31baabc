"""
The exporter's real server, listening in a thread, and clients that behave well or badly.
"""

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rankscope_exporter.serve.server import Server, bind, create_server, run_in_thread
from rankscope_exporter.serve.settings import ServeSettings

WAIT = 60
"""Seconds until something that should happen counts as never happening: far more than a busy machine needs."""


@dataclass(frozen=True)
class Listening:
    """A server that listens on `port` of 127.0.0.1."""

    server: Server
    port: int

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        token: str = "",
        body: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Status and body of an answer, over a connection of its own."""
        kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
        options = {} if tls is None else {"context": tls}
        connection = kind("127.0.0.1", self.port, timeout=WAIT, **options)
        with contextlib.closing(connection):
            sent = dict(headers or {}) | ({"Authorization": f"Bearer {token}"} if token else {})
            connection.request(method, path, body=body, headers=sent)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@contextlib.contextmanager
def listening(settings: ServeSettings) -> Iterator[Listening]:
    """A server with these settings, on a port that is free."""
    listener = bind(settings.model_copy(update={"port": 0}))
    port = listener.getsockname()[1]
    server = create_server(settings, listener)
    announced, ready = server._announce, threading.Event()

    def announce() -> None:
        announced()
        ready.set()

    server._announce = announce
    thread = threading.Thread(target=run_in_thread, args=(server, listener))
    thread.start()
    try:
        assert ready.wait(WAIT)
        yield Listening(server, port)
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, after whatever it still sends."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True
