"""
A receiver of HTTP in a thread: remembers what it was sent, answers as it is told.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WAIT = 60
"""Seconds until something that should happen counts as never happening: far more than a busy machine needs."""


@dataclass(frozen=True)
class Caught:
    """A request."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float

    def json(self):
        return json.loads(self.body)


@dataclass
class Catching:
    """What was sent to `url`; `before` is called before a request is answered."""

    url: str = ""
    status: int = 200
    caught: list[Caught] = field(default_factory=list)
    before: Callable[[Caught], None] = lambda _: None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of what was caught."""
        with self.changed:
            assert self.changed.wait_for(holds, timeout=WAIT), [request.body for request in self.caught]


@contextlib.contextmanager
def catching() -> Iterator[Catching]:
    """Such a receiver, on a port that is free."""
    made = Catching()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Caught(self.path, headers, body, time.monotonic())
            made.before(request)
            with made.changed:
                made.caught.append(request)
                made.changed.notify_all()
            with contextlib.suppress(ConnectionError):  # who sent it was killed meanwhile
                self.send_response(made.status)
                self.send_header("content-length", "0")
                self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join(WAIT)
        server.server_close()
