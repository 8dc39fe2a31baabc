"""
Connections over real sockets: clients that are slow, silent, greedy or many hold nobody up.
"""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from listening import WAIT, Listening, is_closed, listening

from rankscope_exporter.serve import server as server_module
from rankscope_exporter.serve.app import MAX_BODY_BYTES
from rankscope_exporter.serve.connections import Connections
from rankscope_exporter.serve.limits import MAX_HEAD_BYTES
from rankscope_exporter.serve.settings import ServeSettings

Make = Callable[..., Any]
Serve = Callable[..., Listening]
HALF_HEAD = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
GET_HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Stub:
    """A connection that remembers being dropped."""

    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


@given(
    limit=st.integers(1, 6),
    reserve=st.integers(0, 3),
    actions=st.lists(st.tuples(st.sampled_from(["open", "begin", "end", "close"]), st.integers(0, 9)), max_size=80),
)
def test_any_order_of_events(limit: int, reserve: int, actions: list[tuple[str, int]]) -> None:
    """Never more than the limit and the reserve; only a connection that waits is dropped, and only to make room."""
    connections, alive, busy = Connections(limit, reserve), [], set()
    for action, number in actions:
        if action == "open":
            made, waited = Stub(), [stub for stub in alive if stub not in busy]
            full = len(alive) >= limit
            admitted = connections.admit(made)
            dropped = [stub for stub in alive if stub.dropped]
            assert dropped == (waited[:1] if full else [])
            assert admitted is (bool(waited) or len(alive) < limit + reserve)
            alive = [stub for stub in alive if not stub.dropped] + ([made] if admitted else [])
        elif alive:
            stub = alive[number % len(alive)]
            if action == "begin":
                connections.begin(stub)
                busy.add(stub)
            elif action == "end" and stub in busy:
                connections.end(stub)
                busy.discard(stub)
                alive.remove(stub)  # the one that waits since just now comes last
                alive.append(stub)
            elif action == "close":
                connections.forget(stub)
                alive.remove(stub)
                busy.discard(stub)
        assert len(connections) == len(alive) <= limit + reserve
        assert connections.crowded is (len(alive) > limit)


@pytest.fixture
def serve(serve_settings: ServeSettings) -> Iterator[Serve]:
    """Serves for real, with changes to the settings by keyword."""
    with ExitStack() as stack:

        def start(**changes: Any) -> Listening:
            return stack.enter_context(listening(serve_settings.model_copy(update=changes)))

        yield start


pytestmark = pytest.mark.integration


@pytest.mark.parametrize("sent", [b"", b"G", HALF_HEAD])
def test_half_a_request(serve: Serve, sent: bytes) -> None:
    """A client that sends half a request and waits is let go of in time, and holds nobody up until then."""
    listens = serve(request_seconds=0.5)
    with listens.connect() as slow:
        slow.sendall(sent)
        assert listens.ask("/healthz")[0] == 200
        assert is_closed(slow)


@pytest.mark.parametrize("first", [b"", GET_HEALTH])
def test_byte_by_byte(serve: Serve, first: bytes) -> None:
    """The time for a request does not begin anew with each byte, not even on a connection that was used well before."""
    listens = serve(request_seconds=0.5, keep_alive_seconds=WAIT)
    with listens.connect() as slow:
        if first:
            slow.sendall(first)
            assert slow.recv(16).startswith(b"HTTP/1.1 200")
        slow.sendall(HALF_HEAD)
        began = time.monotonic()
        ended = False
        while not ended and time.monotonic() < began + WAIT:
            time.sleep(0.02)  # the pace of the client, not a wait for the server
            try:
                slow.sendall(b"x")
            except ConnectionError:
                ended = True
        assert ended


def test_slow_body(serve: Serve, token: str) -> None:
    """A command whose body does not come is answered with 408, and the connection ends."""
    listens = serve(request_seconds=0.5)
    head = (
        f"PUT /v1/control HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 100\r\n\r\n"
    )
    with listens.connect() as slow, slow.makefile("rb") as answers:
        slow.sendall(head.encode() + b'{"engine"')
        assert listens.ask("/healthz")[0] == 200
        answer = answers.read()  # to the end of the connection
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"within 0.5 s" in answer


def test_body_that_nobody_reads(serve: Serve) -> None:
    """A body where none belongs is not waited for."""
    listens = serve(request_seconds=0.5, keep_alive_seconds=0.5)
    with listens.connect() as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\nx")
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
        assert is_closed(slow)


def test_client_that_takes_no_answer(serve: Serve, rank_file: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks and asks and reads nothing is let go of, with whatever was to be sent to it."""
    for number in range(8):
        rank_file(number, pp_size=8).steps(2)
    monkeypatch.setattr(server_module, "ANSWER_SECONDS", 0.5)
    listens = serve(request_rate=0.0, keep_alive_seconds=WAIT)
    connections = listens.server._app.state.connections
    with socket.socket() as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.connect(("127.0.0.1", listens.port))
        greedy.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000)
        assert listens.ask("/healthz")[0] == 200
        deadline = time.monotonic() + WAIT
        while len(connections) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(connections) == 0


def test_idle_connection(serve: Serve) -> None:
    """A connection that is kept open serves several requests and ends some time after the last."""
    listens = serve(keep_alive_seconds=0.5)
    with closing(http.client.HTTPConnection("127.0.0.1", listens.port, timeout=WAIT)) as kept:
        for _ in range(3):
            kept.request("GET", "/healthz")
            assert kept.getresponse().read()
        assert kept.sock is not None
        assert is_closed(kept.sock)


@pytest.mark.parametrize("bytes_sent", [MAX_HEAD_BYTES + 1, 4 << 20])
def test_endless_headers(serve: Serve, bytes_sent: int) -> None:
    """Headers without end are refused at the limit, whether they come at once or bit by bit."""
    listens = serve()
    with listens.connect() as greedy:
        try:
            greedy.sendall(HALF_HEAD)
            for _ in range(0, bytes_sent, 8192):
                greedy.sendall(b"x" * 8192)
        except ConnectionError:
            return
        answer = greedy.recv(65536)
    assert answer.startswith(b"HTTP/1.1 4")


def test_long_body(serve: Serve, token: str) -> None:
    """A body that is too long is refused before it has come."""
    listens = serve()
    head = f"PUT /v1/control HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 1000000000\r\n\r\n"
    with listens.connect() as greedy:
        greedy.sendall(head.encode() + b" " * (MAX_BODY_BYTES + 1))
        assert greedy.recv(65536).startswith(b"HTTP/1.1 413")


def test_idle_connections_keep_nobody_out(serve: Serve) -> None:
    """However many connections do nothing, a client that asks is answered: the ones that waited longest end."""
    listens = serve(max_connections=8, request_seconds=WAIT)
    with ExitStack() as stack:
        idle = [stack.enter_context(listens.connect()) for _ in range(40)]
        assert listens.ask("/metrics")[0] == 200
        assert json.loads(listens.ask("/healthz")[1])["status"] == "ok"
        assert all(is_closed(connection) for connection in idle[:32])
        assert len(listens.server._app.state.connections) <= 8


def test_busy_connections(serve: Serve, token: str) -> None:
    """Where all connections are busy, health says so with 200, anything else is answered with 503, and too many are refused."""
    listens = serve(max_connections=8, request_seconds=WAIT)
    head = (
        f"PUT /v1/control HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 100\r\n\r\n"
    )
    connections = listens.server._app.state.connections
    with ExitStack() as stack:

        def occupy(expected: int) -> None:
            stack.enter_context(listens.connect()).sendall(head.encode())
            deadline = time.monotonic() + WAIT
            while len(connections._busy) < expected and time.monotonic() < deadline:
                time.sleep(0.005)

        for expected in range(1, 9):
            occupy(expected)
        status, text = listens.ask("/healthz")
        refused = listens.ask("/metrics")

        assert (status, json.loads(text)["status"]) == (200, "degraded")
        assert "more than 8 connections are busy" in json.loads(text)["problems"][0]
        assert (refused[0], "RANKSCOPE_MAX_CONNECTIONS" in refused[1]) == (503, True)

    deadline = time.monotonic() + WAIT
    while len(connections) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert listens.ask("/metrics")[0] == 200


def test_garbage(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """What is no HTTP is refused, and a client cannot fill the log with it."""
    listens = serve()
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\x00" * 100, b"POST / HTTP/1.1\r\n\r\n"):
        with listens.connect() as odd:
            odd.sendall(garbage + b"\r\n\r\n")
            assert is_closed(odd)
    assert listens.ask("/healthz")[0] == 200
    assert [record for record in caplog.records if record.name.startswith(("uvicorn", "asyncio"))] == []
