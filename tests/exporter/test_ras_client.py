"""
Asking NCCL's RAS port: a fake one that answers, and ones that are slow, broken, huge or something else altogether.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_ras import HASH, FakeRas, communicator, document, rank, text

from rankscope_exporter.serve.ras_address import MAX_PORTS, RasAddress, parse_addresses
from rankscope_exporter.serve.ras_answer import Answer, RasError
from rankscope_exporter.serve.ras_client import RasLimits, ask

QUICK = RasLimits(line_seconds=0.2, answer_seconds=0.3, answer_bytes=64 << 10)

Speak = Callable[[FakeRas, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def asked(port: FakeRas, limits: RasLimits = QUICK) -> Answer:
    """
    One question to `port`.
    """

    async def talk() -> Answer:
        async with port.listening():
            return await ask(port.address, limits)

    return asyncio.run(talk())


def reason(port: FakeRas, limits: RasLimits = QUICK) -> str:
    """
    Why the question brought nothing.
    """
    with pytest.raises(RasError) as caught:
        asked(port, limits)
    return caught.value.reason


def test_json() -> None:
    """A release that knows JSON is asked for it."""
    port = FakeRas()
    port.json = document(communicator([rank(0), rank(1)]))

    answer = asked(port)

    assert (answer.format, answer.communicators[0].id) == ("json", HASH)
    assert port.commands == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"]


def test_text() -> None:
    """A release that does not is asked for its verbose text, on the same connection."""
    port = FakeRas()
    port.json, port.text = None, text("0 1 1 2 2 2 RUNNING OK")

    assert asked(port).format == "text"
    assert (port.commands[-1], port.connections) == ("VERBOSE STATUS", 1)


def test_large_answer() -> None:
    """An answer of many pieces is put together."""
    port = FakeRas()
    port.json = document(*(communicator([rank(r) for r in range(64)], name=f"{n:016x}") for n in range(1, 9)))

    assert len(asked(port, RasLimits()).communicators) == 8


def test_nobody_listens() -> None:
    """A port where nothing listens costs one refused connection, and the message says what may be the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = RasAddress("localhost", taken.getsockname()[1])

        with pytest.raises(RasError, match="NCCL_RAS_ENABLE") as caught:
            asyncio.run(ask(address, QUICK))

    assert caught.value.reason == "refused"


async def _silent(port: FakeRas, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _first_is_silent(port: FakeRas, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await (_silent if port.connections == 1 else FakeRas.answer)(port, reader, writer)


async def _closes(port: FakeRas, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()


async def _resets(port: FakeRas, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def _web_server(port: FakeRas, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def _one_long_line(port: FakeRas, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"x" * 100_000)
    await reader.read()


def after_greeting(body: bytes, *, then_wait: bool = False, repeat: int = 1) -> Speak:
    """
    A port that greets as NCCL does and then answers with `body`.
    """

    async def speak(port: FakeRas, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in (b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n"):
            await reader.readline()
            writer.write(reply)
        await reader.readline()
        for _ in range(repeat):
            writer.write(body)
            await writer.drain()
        if then_wait:
            await reader.read()

    return speak


def test_stopped_process() -> None:
    """A connection that falls to a process that is stopped is given up and another one is made."""
    port = FakeRas()
    port.speak = _first_is_silent

    assert (asked(port).format, port.connections) == ("json", 2)


@pytest.mark.parametrize(
    ("speak", "expected"),
    [
        (_silent, "timeout"),
        (_closes, "closed"),
        (_resets, "closed"),
        (_web_server, "unknown format"),
        (_one_long_line, "unknown format"),
        (after_greeting(b""), "closed"),
        (after_greeting(document().encode()[:100]), "cut short"),
        (after_greeting(b'{"nccl_version": ', then_wait=True), "timeout"),
        (after_greeting(b"x" * 1024, repeat=100), "too large"),
        (after_greeting(b"\xff\xfe\x00"), "unknown format"),
        (after_greeting(b"ERROR: not today\n"), "unknown format"),
    ],
)
def test_bad_ports(speak: Speak, expected: str) -> None:
    """Whatever is on the other side, the question ends within its limits and says why it brought nothing."""
    port = FakeRas()
    port.speak = speak

    assert reason(port) == expected


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        (["SERVER PROTOCOL 2", "ERROR: Invalid timeout value 2"], "TIMEOUT"),
        (["SERVER PROTOCOL 2", "OK", "ERROR: busy"], "SET FORMAT"),
    ],
)
def test_odd_replies(replies: list[str], says: str) -> None:
    """A reply that is not one of the known ones is an unknown format, not a reason to go on."""

    async def speak(port: FakeRas, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            await reader.readline()
            writer.write(f"{reply}\n".encode())
        await reader.read()

    port = FakeRas()
    port.speak = speak

    with pytest.raises(RasError, match=says) as caught:
        asked(port)

    assert caught.value.reason == "unknown format"


def test_time_in_all() -> None:
    """However the time of a question is spent, there is an end to it."""
    port = FakeRas()
    port.speak = _silent

    assert reason(port, RasLimits(line_seconds=30.0, total_seconds=0.2)) == "timeout"


def test_unreachable() -> None:
    """A host that has no address is told as such."""
    with pytest.raises(RasError) as caught:
        asyncio.run(ask(RasAddress("256.256.256.256", 28028), RasLimits(line_seconds=5.0)))

    assert caught.value.reason in {"unreachable", "timeout"}


@pytest.mark.parametrize(
    ("setting", "addresses"),
    [
        ("auto", ["localhost:28028"]),
        (" AUTO ", ["localhost:28028"]),
        ("off", []),
        ("10.0.0.7:28030", ["10.0.0.7:28030"]),
        ("[::1]:28030", ["[::1]:28030"]),
        ("localhost:28028, localhost:28029,localhost:28028", ["localhost:28028", "localhost:28029"]),
    ],
)
def test_addresses(setting: str, addresses: list[str]) -> None:
    """A setting names no port, the default one, or several."""
    assert [str(address) for address in parse_addresses(setting)] == addresses


@pytest.mark.parametrize(
    "setting",
    ["", "on", "localhost", ":28028", "localhost:", "localhost:0", "localhost:65536", "localhost:²", "a:1,,b:2"],
)
def test_bad_addresses(setting: Any) -> None:
    """A setting that names nothing is refused with what it may be."""
    with pytest.raises(ValueError, match="auto, off or host:port"):
        parse_addresses(setting)


def test_too_many_addresses() -> None:
    """The number of ports is bounded."""
    with pytest.raises(ValueError, match="at most"):
        parse_addresses(",".join(f"localhost:{n + 1}" for n in range(MAX_PORTS + 1)))
