"""
What NCCL's RAS port says, made to order: answers in its two formats, and a port that gives them.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from rankscope_exporter.serve.ras_address import RasAddress

TYPES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
HASH = "00c3a1b2d4e5f607"


def rank(number: int, pid: int = 0, *, host: str = "10.1.2.3", **changes: Any) -> dict[str, Any]:
    """
    A rank of a communicator that runs; `counts` by type, other changes go to its status.
    """
    counts = dict.fromkeys(TYPES, 0) | changes.pop("counts", {})
    status = {
        "init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False,
    } | changes  # fmt: skip
    return {
        "rank": number, "host": host, "pid": pid or 7000 + number, "cuda_dev": number, "nvml_dev": number,
        "status": status, "collective_counts": counts,
    }  # fmt: skip


def missing(number: int, *, unresponsive: bool = True, dead: bool = False) -> dict[str, Any]:
    """
    A rank of which there is no data.
    """
    return {
        "rank": number, "host": "10.1.2.3", "pid": 7000 + number, "cuda_dev": number, "nvml_dev": number,
        "status": {"unresponsive": unresponsive, "considered_dead": dead},
    }  # fmt: skip


def communicator(
    ranks: list[dict[str, Any]], absent: list[dict[str, Any]] | None = None, *, name: str = HASH, **changes: Any
) -> dict[str, Any]:
    """
    A communicator; its hash is written as NCCL does, without leading zeros.
    """
    absent = absent or []
    return {
        "hash": f"0x{int(name, 16):x}", "secondary_hash": "0x1a:0x2b", "size": len(ranks) + len(absent), "ranks_count": len(ranks),
        "missing_ranks_count": len(absent), "ranks": ranks, "missing_ranks": absent,
    } | changes  # fmt: skip


def document(*communicators: dict[str, Any], version: str = "2.29.1", **changes: Any) -> str:
    """
    A whole answer in JSON.
    """
    return (
        json.dumps(
            {
                "nccl_version": version, "cuda_runtime_version": 13000, "cuda_driver_version": 13000, "timestamp": "2026-01-02 03:04:05",
                "communicators_count": len(communicators), "communicators": list(communicators),
                "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
            } | changes,
            indent=2,
        )
        + "\n"
    )  # fmt: skip


def text(rows: str, errors: str = "", warnings: str = "", version: str = "2.27.5") -> str:
    """
    A whole answer in text; `rows` of the table as `group comms nodes per-node size ranks STATUS ERRORS`.
    """
    table = "".join(
        f"{a:>5}  {b:>8}  {c:>8}  {d:>8}  {e:>8}  {f:>8}  {g:>8}  {h:>6}\n"
        for a, b, c, d, e, f, g, h in (row.split() for row in rows.strip().splitlines())
    )
    return (
        f"NCCL version {version} compiled with CUDA 12.9\nCUDA runtime version 12090, driver version 13000\n\n"
        "Job summary\n===========\n\n  Nodes  Processes         GPUs  Processes     GPUs\n"
        "(total)   per node  per process    (total)  (total)\n      1          2            1          2        2\n"
        "\nCommunicators... (0.00s)\n=============\n\n"
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        "    #  in group  per comm  per node  per comm  in group\n"
        f"{table}\nErrors\n======\n\n{errors}Warnings\n========\n\n{warnings}"
    )


class FakeRas:
    """
    A RAS port on loopback. `json` None is an NCCL that does not know that format yet.
    """

    def __init__(self) -> None:
        self.json: str | None = document()
        self.text = ""
        self.commands: list[str] = []
        self.connections = 0
        self.speak: Callable[[FakeRas, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] = FakeRas.answer
        self.address = RasAddress("127.0.0.1", 1)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """
        What NCCL does: a line for each command, and the status last.
        """
        chosen = "text"
        while line := (await reader.readline()).decode().strip():
            self.commands.append(line)
            if line.startswith("CLIENT PROTOCOL"):
                reply = "SERVER PROTOCOL 2\n"
            elif line.startswith("SET FORMAT"):
                known = self.json is not None
                chosen, reply = ("json", "OK\n") if known else ("text", f"ERROR: Unknown command {line}\n")
            elif line.startswith("TIMEOUT"):
                reply = "OK\n"
            else:
                body = (self.json or "") if chosen == "json" else self.text
                writer.write(body.encode())
                await writer.drain()
                return
            writer.write(reply.encode())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with contextlib.suppress(ConnectionError):
                await self.speak(self, reader, writer)
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["FakeRas"]:
        """
        Listen, on a free port, for as long as the context lasts.
        """
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = RasAddress("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            yield self
        finally:
            server.close()
