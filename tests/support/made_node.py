"""
Nodes with real flight files behind the real exporter application, and a server that polls them, all in one process and
on one clock that only tests turn.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
from made_ranks import ManualClock, made_record, made_report

from rankscope_exporter.contract import ControlOutcome, MitigationState, Phase
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.node import Clock
from rankscope_exporter.serve.settings import ServeSettings
from rankscope_server.app import create_service
from rankscope_server.control.service import Service
from rankscope_server.settings import load_settings

TOKEN = "a-token-for-tests-only"
NODE_START_NS = 5_000_000_000


class MadeRank:
    """A rank that writes a real flight file, a step when a test says so."""

    def __init__(self, directory: Path, pp_rank: int, clock: ManualClock, **report: Any) -> None:
        made = made_report(pp_rank, pid=os.getpid(), **report)
        self.clock = clock
        self.writer = FlightWriter(directory, made.key, made.identity.model_dump(mode="json"), capacity=256)
        self.set_trim(MitigationState.AVAILABLE)

    def set_trim(self, state: MitigationState) -> None:
        self.writer.write_report(
            {
                "hooks": [{"hook": "_update_states", "state": "on", "reason": ""}],
                "mitigations": [{"mitigation": "trim", "state": int(state), "reason": ""}],
            }
        )
        self.writer.words[layout.ACK_STATE] = int(state)

    def step(self, step: int, phase: Phase = Phase.DONE, **fields: Any) -> None:
        now = node_ns(self.clock)
        times: dict[str, Any] = {"begin_ns": now - 15_000_000}
        times |= {"decide_ns": now - 5_000_000} if phase >= Phase.DECIDED else {}
        times |= {"end_ns": now} if phase >= Phase.DONE else {}
        record = made_record(step, phase, **(times | {"mitigation": self.writer.words[layout.ACK_STATE]} | fields))
        at = layout.RING_OFFSET + step % self.writer.capacity * layout.STEP_DTYPE.itemsize
        self.writer.memory[at : at + layout.STEP_DTYPE.itemsize] = record.tobytes()
        self.writer.live[layout.LIVE_STEP] = step

    def steps(self, first: int, last: int, **fields: Any) -> None:
        for step in range(first, last + 1):
            self.step(step, **fields)

    @property
    def word(self) -> tuple[int, int, int, bool]:
        """Mitigation, generation, effective step and desired state that it was sent."""
        return layout.decode_control(int(self.writer.words[layout.CONTROL_REQUEST]))

    def act(self) -> None:
        """Act on the control word at its step, as the worker's side does."""
        words = self.writer.words
        word = int(words[layout.CONTROL_REQUEST])
        _, _, step, desired = layout.decode_control(word)
        words[layout.ACK_OBSERVED] = words[layout.ACK_WORD] = word
        words[layout.ACK_STEP] = step
        words[layout.ACK_OUTCOME] = int(ControlOutcome.APPLIED)
        self.set_trim(MitigationState.APPLIED if desired else MitigationState.AVAILABLE)


def node_ns(clock: ManualClock) -> int:
    """The node's monotonic clock; it goes with the server's, from another beginning."""
    return NODE_START_NS + round((clock.now().monotonic - 1000.0) * 1e9)


class Nodes(httpx2.AsyncBaseTransport):
    """Nodes by address. `broken` says which requests fail."""

    def __init__(self, directory: Path, clock: ManualClock) -> None:
        self.directory = directory
        self.clock = clock
        self.broken: Callable[[httpx2.Request], bool] = lambda _: False
        self.seen: list[httpx2.Request] = []
        self._apps: dict[str, httpx2.ASGITransport] = {}

    def add(self, address: str) -> Path:
        """A node at `address`; its flight directory."""
        flight_dir = self.directory / address
        flight_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings = ServeSettings(
            flight_dir=flight_dir, control_token=TOKEN, request_rate=0
        )  # loops turn faster than clocks here
        clock = Clock(unix=lambda: self.clock.now().unix, monotonic_ns=lambda: node_ns(self.clock))
        self._apps[address] = httpx2.ASGITransport(app=create_app(settings, clock=clock))
        return flight_dir

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.seen.append(request)
        if self.broken(request):
            raise httpx2.ConnectError("refused", request=request)
        return await self._apps[request.url.host].handle_async_request(request)


def made_service(tmp_path: Path, nodes: Nodes, *targets: str, data: str = "data") -> Service:
    """A server without pages that polls these targets with the right token."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    settings = load_settings(
        None, [f"{target},token-file={token}" for target in targets], {"data_dir": tmp_path / data}
    )
    return create_service(settings, clock=nodes.clock, transport=nodes)


async def poll(service: Service) -> None:
    """One round of everything that the server does by itself, but the loops."""
    for poller in service.pollers:
        await poller.poll_ranks()
        await poller.poll_steps()
        await poller.poll_requests()
    service.look()
