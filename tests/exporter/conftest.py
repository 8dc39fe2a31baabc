"""
Flight files as ranks leave them, and the exporter process's application over them.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from rankscope_exporter.contract import Guard, MitigationState, Phase, RankIdentity, Role
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.node import Clock
from rankscope_exporter.serve.settings import ServeSettings

TOKEN = "a-token-for-tests-only"


class RankFile:
    """
    A flight file through the real writer, with records put in field by field.
    """

    def __init__(
        self,
        directory: Path,
        pp_rank: int = 0,
        *,
        engine: str = "e1",
        key: str | None = None,
        capacity: int = 64,
        **identity: Any,
    ) -> None:
        self.identity = RankIdentity(**{
            "engine": engine, "dp_rank": 0, "pp_rank": pp_rank, "tp_rank": 0, "pp_size": 2, "tp_size": 1, "dp_size": 1, "global_rank": pp_rank,
            "host": "node-a", "pid": os.getpid(), "model": "some/model", "vllm_version": "0.27.1", "runner": "V1", "runner_class": "CPUModelRunner",
            "device": "cpu", "async_scheduling": True, "spec_method": "draft_model", "spec_tokens": 3, "exporter_version": "0.1.0",
            "completes": True,
        } | identity)  # fmt: skip
        self.key = key or f"{engine}-dp0-pp{pp_rank}-tp0"
        self.writer = FlightWriter(directory, self.key, self.identity.model_dump(mode="json"), capacity=capacity)
        self.path = self.writer.path
        self.report: dict[str, Any] = {}
        self.mitigation(MitigationState.AVAILABLE)

    def mitigation(self, state: MitigationState, reason: str = "", hooks: list[dict[str, Any]] | None = None) -> None:
        """Report the trim fix, and hooks if given."""
        hooks = [{"hook": "update_states", "state": "on", "reason": ""}] if hooks is None else hooks
        self.report |= {"hooks": hooks, "mitigations": [{"mitigation": "trim", "state": int(state), "reason": reason}]}
        self.writer.write_report(self.report)
        self.writer.words[layout.ACK_STATE] = int(state)

    def step(self, step: int, phase: Phase = Phase.DONE, **fields: int) -> None:
        """Put in the record of a step, with all parts that its phase has."""
        now = time.monotonic_ns()
        values: dict[str, int] = {
            "step": step,
            "batch_hash": step,
            "begin_ns": now,
            "cached": 2,
            "scheduled_tokens": 8,
            "drafting": 2,
        }
        if phase >= Phase.STATE_UPDATED:
            values |= {
                "state_sum": 30,
                "scheduler_sum": 30,
                "state_max": 20,
                "scheduler_max": 20,
                "lengths": 1,
                "mitigation": 1,
            }
        if phase >= Phase.DECIDED:
            values |= {
                "decide_ns": now,
                "broadcasts_total": step,
                "posted_total": step,
                "requests": 2,
                "width": 4,
                "guard": Guard.BROADCAST,
            }
            values |= {"role": Role.SENDER, "mask_known": 1}
        if phase >= Phase.DONE:
            values |= {"end_ns": now, "completed_total": step, "own_ns_total": step * 1000, "own_ns": 1000}
        record = np.zeros(1, layout.STEP_DTYPE)
        for name, value in (values | fields).items():
            record[name] = value
        record["phase"] = phase
        offset = layout.RING_OFFSET + step % self.writer.capacity * layout.STEP_DTYPE.itemsize
        self.writer.memory[offset : offset + layout.STEP_DTYPE.itemsize] = record.tobytes()
        self.writer.live[layout.LIVE_STEP] = step

    def fail(self, step: int, phase: Phase = Phase.DECIDED, **failure: str) -> None:
        """Put in a step that an error ended; what `failure` says (method, kind) of it is reported, nothing if it says nothing."""
        self.step(step, phase, failed=1)
        self.writer.live[layout.LIVE_FAILED_STEPS] += 1
        self.writer.live[layout.LIVE_FAILED_STEP] = step
        if failure:
            self.report |= {"failure": {"step": step, "phase": int(phase), **failure}}
            self.writer.write_report(self.report)

    def own_time(self, **steps: int) -> None:
        """Put in measured steps: `b3=2` are two in bucket 3, of that bucket's bound each."""
        for name, count in steps.items():
            bucket = int(name.removeprefix("b"))
            self.writer.own[bucket] += count
            self.writer.own[layout.OWN_BUCKETS] += count * (1000 << bucket)

    def device(self, **fields: int) -> None:
        """Put in a sample of device-side lengths, taken now unless `taken_ns` says otherwise."""
        values = {"sequence": 2, "every": 64, "samples": 1, "taken_ns": time.monotonic_ns()} | fields
        names = layout.DEVICE_DTYPE.names or ()
        layout.DEVICE.pack_into(self.writer.device, 0, *(values.get(name, 0) for name in names))

    def steps(self, count: int) -> None:
        """Put in steps 1 to count, all done."""
        for step in range(1, count + 1):
            self.step(step)

    def process(self, pid: int, start_ticks: int) -> None:
        """Make it the file of another process."""
        head = list(layout.HEADER.unpack_from(self.writer.memory, 0))
        head[7], head[9] = pid, start_ticks
        layout.HEADER.pack_into(self.writer.memory, 0, *head)

    def gone(self) -> None:
        """Make it the file of a process whose pid is another's by now."""
        self.process(os.getpid(), 1)


@pytest.fixture
def flight_dir(tmp_path: Path) -> Path:
    """An empty flight directory."""
    directory = tmp_path / "flight"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def rank_file(flight_dir: Path) -> Callable[..., RankFile]:
    """Makes flight files in the flight directory."""

    def make(pp_rank: int = 0, **options: Any) -> RankFile:
        return RankFile(flight_dir, pp_rank, **options)

    return make


@pytest.fixture
def token() -> str:
    """The control token of the application under test."""
    return TOKEN


@pytest.fixture
def serve_settings(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ServeSettings:
    """Settings for the flight directory, with control on, whatever the environment of the test run says."""
    for name in [name for name in os.environ if name.startswith("RANKSCOPE_")]:
        monkeypatch.delenv(name)
    return ServeSettings(flight_dir=flight_dir, control_token=TOKEN)


@pytest.fixture
def client(serve_settings: ServeSettings) -> Iterator[TestClient]:
    """A client of the real application."""
    with TestClient(create_app(serve_settings), base_url="http://127.0.0.1:9610") as client:
        yield client


@pytest.fixture
def still_clock() -> Clock:
    """Clocks that stand: half past nine on a day in 2026, ten minutes after boot."""
    return Clock(unix=lambda: 1_780_000_000.0, monotonic_ns=lambda: 600_000_000_000)
