"""
One question to NCCL's RAS port.

The protocol is one command per line, each answered by a line, until `STATUS`: its answer ends when NCCL closes the
connection. Commands that change anything exist in newer releases; none of them is ever sent.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from rankscope_exporter.serve.ras_address import RasAddress
from rankscope_exporter.serve.ras_answer import Answer, RasError, UnknownFormatError, quoted
from rankscope_exporter.serve.ras_json import parse_json
from rankscope_exporter.serve.ras_text import parse_text

PROTOCOL = 2
MAX_LINE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RasLimits:
    """
    How much time and memory one question may take.
    """

    line_seconds: float = 1.0
    """For the connection, and for each line before the answer: a RAS thread that is alive answers at once."""
    answer_seconds: float = 9.0
    """For the answer: NCCL gives up on silent processes after `leg_seconds` and 5 seconds more."""
    leg_seconds: int = 2
    """For which NCCL waits for its other processes."""
    total_seconds: float = 14.0
    """For all of it, whatever the parts take."""
    answer_bytes: int = 4 << 20
    attempts: int = 3
    """Connections that are tried while nobody answers. All processes of a node share the port, and the kernel picks one of
    them for each connection: a process that is stopped must not hide the others."""


LIMITS = RasLimits()


class _SilenceError(Exception):
    """
    Nothing came in time.
    """


async def ask(address: RasAddress, limits: RasLimits = LIMITS) -> Answer:
    """
    Ask for the status of all communicators.

    Raises:
        RasError: there is no answer, or none that can be used; `reason` says which.

    """
    try:
        return await asyncio.wait_for(_ask(address, limits), limits.total_seconds)
    except asyncio.TimeoutError as error:
        msg = f"{address} took longer than {limits.total_seconds:g} s"
        raise RasError("timeout", msg) from error


async def _ask(address: RasAddress, limits: RasLimits) -> Answer:
    for _ in range(limits.attempts):
        try:
            return await _ask_once(address, limits)
        except _SilenceError:  # noqa: PERF203  # three attempts at most
            pass
    msg = f"{address} takes connections and says nothing for {limits.line_seconds:g} s ({limits.attempts} attempts)"
    raise RasError("timeout", msg)


async def _ask_once(address: RasAddress, limits: RasLimits) -> Answer:
    reader, writer = await _connect(address, limits)
    try:
        return await _converse(_Line(reader, writer, limits.line_seconds), address, limits)
    except OSError as error:
        msg = f"{address} broke off the connection: {error.strerror or error}"
        raise RasError("closed", msg) from error
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _connect(address: RasAddress, limits: RasLimits) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    refused = False
    problem: OSError | None = None
    for host in address.candidates:
        try:
            return await asyncio.wait_for(
                asyncio.open_connection(host, address.port, limit=MAX_LINE_BYTES), limits.line_seconds
            )
        except asyncio.TimeoutError as error:  # noqa: PERF203  # two hosts at most
            raise _SilenceError from error
        except ConnectionRefusedError:
            refused = True
        except OSError as error:
            problem = error
    if refused:
        msg = (
            f"nothing listens on {address}: no NCCL of 2.24 or newer runs here, NCCL_RAS_ENABLE=0 turned its RAS off, "
            "or NCCL_RAS_ADDR names another port"
        )
        raise RasError("refused", msg)
    msg = f"{address} cannot be reached: {problem and (problem.strerror or problem)}"
    raise RasError("unreachable", msg)


class _Line:
    """
    Sends commands and takes their answers.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
        self.reader = reader
        self._writer = writer
        self._seconds = seconds

    def send(self, command: str) -> None:
        self._writer.write(f"{command}\n".encode())

    async def command(self, command: str) -> str:
        """
        Send a command and wait for the line that answers it.
        """
        self.send(command)
        try:
            line = await asyncio.wait_for(self.reader.readline(), self._seconds)
        except asyncio.TimeoutError as error:
            raise _SilenceError from error
        except ValueError as error:
            msg = f"the answer to {command} is no line of at most {MAX_LINE_BYTES} bytes"
            raise UnknownFormatError(msg) from error
        if not line.endswith(b"\n"):
            msg = f"the connection was closed in answer to {command}"
            raise RasError("closed", msg)
        return line.decode("ascii", "replace").strip()


async def _converse(line: _Line, address: RasAddress, limits: RasLimits) -> Answer:
    hello = await line.command(f"CLIENT PROTOCOL {PROTOCOL}")
    if not hello.upper().startswith("SERVER PROTOCOL "):
        msg = f"{address} is no RAS port: it says {quoted(hello)}"
        raise UnknownFormatError(msg)
    timeout = await line.command(f"TIMEOUT {limits.leg_seconds}")
    if timeout.upper() != "OK":
        msg = f"the answer to TIMEOUT is {quoted(timeout)}"
        raise UnknownFormatError(msg)
    chosen = (await line.command("SET FORMAT json")).upper()
    if chosen == "OK":
        line.send("STATUS")
        return await _parsed(parse_json, await _read_all(line.reader, address, limits))
    if not chosen.startswith("ERROR: UNKNOWN COMMAND"):
        msg = f"the answer to SET FORMAT is {quoted(chosen)}"
        raise UnknownFormatError(msg)
    line.send("VERBOSE STATUS")
    return await _parsed(parse_text, await _read_all(line.reader, address, limits))


async def _parsed(parse: Callable[[str], Answer], text: str) -> Answer:
    # A large job's answer takes longer to read than a scrape may wait.
    return await asyncio.to_thread(parse, text)


async def _read_all(reader: asyncio.StreamReader, address: RasAddress, limits: RasLimits) -> str:
    try:
        body = await asyncio.wait_for(_read_to_end(reader, limits.answer_bytes), limits.answer_seconds)
    except asyncio.TimeoutError as error:
        msg = f"{address} did not finish its answer within {limits.answer_seconds:g} s"
        raise RasError("timeout", msg) from error
    if not body:
        msg = f"{address} closed the connection instead of an answer"
        raise RasError("closed", msg)
    return body.decode("utf-8", "replace")


async def _read_to_end(reader: asyncio.StreamReader, limit: int) -> bytes:
    body = bytearray()
    while chunk := await reader.read(1 << 16):
        body += chunk
        if len(body) > limit:
            msg = f"the answer has more than {limit} bytes"
            raise RasError("too large", msg)
    return bytes(body)
