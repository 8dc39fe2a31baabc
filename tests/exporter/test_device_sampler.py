"""
Device-side lengths of the V2 runner: copied behind the device's work, asked for and never waited for.

A small fake of torch stands in for a device: a copy takes the values of the moment at which it is enqueued, and they
are on the host once its event is ready; until then the host's memory holds rubbish.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import load_module

from rankscope_exporter.contract import HookState, Phase
from rankscope_exporter.flight import FlightFile, layout
from rankscope_exporter.hooks.install import Installation, install
from rankscope_exporter.recorder.device import DeviceSampler
from rankscope_exporter.settings import WorkerSettings

SOURCE = Path(__file__).parents[1] / "support" / "standin_v2.py"
RUBBISH = -(1 << 30)
EVERY = 4


class Tensor:
    """A tensor; on a device its values may only be copied, and not read."""

    def __init__(self, device: "Device", values: Any, kind: str) -> None:
        self.fake, self.values = device, values
        self.shape, self.dtype = values.shape, values.dtype
        self.device = SimpleNamespace(type=kind)

    def numpy(self) -> Any:
        assert self.device.type == "cpu"
        return self.values

    def copy_(self, source: "Tensor", *, non_blocking: bool) -> None:
        assert non_blocking
        taken = source.values.copy()
        self.values[:] = RUBBISH
        self.fake.enqueue(lambda: np.copyto(self.values, taken))


class Event:
    """An event behind all that is enqueued when it is recorded."""

    def __init__(self, device: "Device") -> None:
        self._device, self.ready, self.asked = device, True, 0
        device.events.append(self)

    def record(self) -> None:
        self.ready = False
        self._device.enqueue(lambda: setattr(self, "ready", True))

    def query(self) -> bool:
        self.asked += 1
        return self.ready

    def synchronize(self) -> None:
        msg = "a hook waited for the device"
        raise AssertionError(msg)

    wait = synchronize


class Device:
    """What of torch the sampler uses. `finish` lets the device do what is enqueued; without `kind` cuda that is at once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.queue: list[Callable[[], None]] = []
        self.events: list[Event] = []
        self.pinned: list[bool] = []
        self.copies = 0
        self.cuda = SimpleNamespace(Event=lambda: Event(self))

    def empty(self, shape: Any, *, dtype: Any, pin_memory: bool) -> Tensor:
        self.pinned.append(pin_memory)
        return Tensor(self, np.full(shape, RUBBISH, dtype=dtype), "cpu")

    def enqueue(self, work: Callable[[], None]) -> None:
        self.copies += 1
        if self.kind == "cuda":
            self.queue.append(work)
        else:
            work()

    def finish(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Rank:
    """
    A rank whose device holds what it should, and more where a test says so.
    """

    def __init__(self, directory: Path, device: Device, every: int = EVERY) -> None:
        self.module: ModuleType = load_module(SOURCE, "standin_v2_device")
        self.device = device
        self.runner = self.module.StandInRunner(last=True)
        self.total, self.computed = (np.zeros(self.module.ROWS, dtype=np.int32) for _ in range(2))
        state = self.runner.req_states
        state.total_len.gpu = Tensor(device, self.total, device.kind)
        state.num_computed_tokens.gpu = Tensor(device, self.computed, device.kind)
        self.scheduler = self.module.Scheduler(size=1)
        self.excess: dict[str, tuple[int, int]] = {}
        self.expected: dict[int, dict[str, int]] = {}
        options = {"flight_dir": directory, "ring_steps": 64, "device_lengths_steps": every, "fault_limit": 3}
        self.installation: Installation = install(
            self.runner, self.module.identity_of(self.runner), WorkerSettings(**options), completes=True
        )

    def take(self) -> int:
        """Take a step, whose number is returned; the device's lengths are the scheduler's at this step, and the excess."""
        output = self.scheduler.schedule()
        cached = output.scheduled_cached_reqs
        state = self.runner.req_states
        totals, computeds = [], []
        for name, outputs, computed in zip(
            cached.req_ids, cached.num_output_tokens, cached.num_computed_tokens, strict=True
        ):
            row = state.req_id_to_index[name]
            more_total, more_computed = self.excess.get(name, (0, 0))
            self.total[row] = state.prompt_len.np[row] + outputs + more_total
            self.computed[row] = computed + more_computed
            totals.append(int(self.total[row]))
            computeds.append(int(self.computed[row]))
        step = self.installation.recorder.step + 1
        self.expected[step] = {"total_sum": sum(totals), "computed_sum": sum(computeds), "rows": len(totals)}
        self.module.take_step(self.runner, output)
        return step

    def sample(self) -> Any:
        """The last sample in the flight file."""
        with FlightFile(self.installation.flight.path) as flight:
            return flight.device_lengths()


@pytest.fixture
def make_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rank]:
    """Makes a rank on a device of a kind; with requests "a" and "b"."""

    def make(kind: str = "cuda", **options: Any) -> Rank:
        device = Device(kind)
        monkeypatch.setitem(sys.modules, "torch", device)
        rank = Rank(tmp_path, device, **options)
        rank.scheduler.add("a", 5)
        rank.scheduler.add("b", 7)
        return rank

    return make


def test_sampling_is_off_unless_asked_for(make_rank):
    """By default nothing is copied, no event is made, and readers are told that it is off."""
    rank = make_rank(every=0)
    for _ in range(20):
        rank.take()
    assert (rank.device.copies, rank.device.events, rank.device.pinned) == (0, [], [])
    assert rank.sample() is None
    assert WorkerSettings.model_fields["device_lengths_steps"].default == 0
    assert "device_lengths" not in rank.installation.hooks


def test_on_a_cpu_a_sample_is_there_at_the_next_step(make_rank):
    """The values are those of the step at which it was taken, compared with what the scheduler said then."""
    rank = make_rank("cpu")
    before = time.monotonic_ns()
    for _ in range(EVERY):
        taken = rank.take()
    assert rank.sample()["samples"] == 0
    rank.take()
    sample = rank.sample()
    assert (sample["samples"], sample["step"], sample["every"]) == (1, taken, EVERY)
    assert {name: int(sample[name]) for name in rank.expected[taken]} == rank.expected[taken]
    assert (sample["excess_rows"], sample["total_excess"], sample["computed_excess"]) == (0, 0, 0)
    assert before < sample["taken_ns"] < time.monotonic_ns()
    assert rank.device.pinned == [False, False]
    assert rank.installation.hooks["device_lengths"].state == HookState.ON


def test_a_copy_that_is_not_there_is_asked_for_again(make_rank):
    """One is under way at most; its event is asked once a step, and nothing waits or is read before it is ready."""
    rank = make_rank()
    for _ in range(EVERY):
        taken = rank.take()
    (event,) = rank.device.events
    copies = rank.device.copies
    for asked in range(1, 5 * EVERY):
        rank.take()
        assert (event.asked, rank.device.copies) == (asked, copies)
        assert rank.sample()["samples"] == 0
    rank.excess["a"] = (9, 9)  # later, and so none of this sample's business
    rank.scheduler.abort("b")
    rank.device.finish()
    rank.take()
    sample = rank.sample()
    assert (sample["samples"], sample["step"], sample["excess_rows"]) == (1, taken, 0)
    assert {name: int(sample[name]) for name in rank.expected[taken]} == rank.expected[taken]
    assert rank.device.pinned == [True, True]
    assert rank.installation.faults.total == 0


@pytest.mark.parametrize(
    ("excess", "found"),
    [
        ({"a": (2, 0)}, (1, 2, 0)),
        ({"b": (0, 3)}, (1, 0, 3)),
        ({"a": (1, 4), "b": (5, 1)}, (2, 5, 4)),
        ({"a": (-2, -1)}, (0, 0, 0)),
        ({"a": (-2, -1), "b": (-3, -2)}, (0, -2, -1)),
    ],
)
def test_lengths_beyond_the_scheduler_are_found(make_rank, excess, found):
    """A device that is ahead of the scheduler is drift; one that is behind is not, as received tokens come late."""
    rank = make_rank()
    rank.excess = excess
    for _ in range(EVERY):
        rank.take()
    rank.excess = {}
    rank.device.finish()
    rank.take()
    sample = rank.sample()
    assert (sample["excess_rows"], sample["total_excess"], sample["computed_excess"]) == found


def test_an_empty_step_takes_no_sample(make_rank):
    """Without requests there is nothing to compare."""
    rank = make_rank()
    rank.scheduler.abort("a")
    rank.scheduler.abort("b")
    for _ in range(3 * EVERY):
        rank.take()
    assert (rank.device.copies, rank.sample()["samples"]) == (0, 0)


def test_where_sampling_cannot_start_it_is_off_and_the_rest_is_on(make_rank, monkeypatch, caplog):
    """No pinned memory: a warning and a reason; hooks and records are as without it."""

    def fail(*_: Any, **__: Any) -> Any:
        msg = "no pinned memory"
        raise RuntimeError(msg)

    monkeypatch.setattr(Device, "empty", fail)
    rank = make_rank()
    report = rank.installation.hooks["device_lengths"]
    assert (report.state, "no pinned memory" in report.reason) == (HookState.OFF, True)
    assert "device-side lengths cannot be sampled here" in caplog.text
    for _ in range(2 * EVERY):
        rank.take()
    with FlightFile(rank.installation.flight.path) as flight:
        assert flight.records()[-1]["phase"] == Phase.DONE
        assert flight.faults() == 0


def test_a_sampler_that_fails_takes_itself_out_alone(make_rank, monkeypatch):
    """Its errors are counted as its own; after a few it is out, and host lengths are still recorded."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError

    rank = make_rank()
    monkeypatch.setattr(Tensor, "copy_", fail)
    for _ in range(10 * EVERY):
        rank.take()
    assert rank.installation.faults.kinds == {"device_lengths": {"RuntimeError": 3}}
    states = {name: report.state for name, report in rank.installation.hooks.items()}
    assert states.pop("device_lengths") == HookState.REMOVED
    assert set(states.values()) == {HookState.ON}
    with FlightFile(rank.installation.flight.path) as flight:
        assert flight.records()[-1]["lengths"] != 0


class States:
    """Lengths on a device."""

    def __init__(self, device: Device, rows: int) -> None:
        self.total, self.computed = (np.zeros(rows, dtype=np.int32) for _ in range(2))
        self.total_len = SimpleNamespace(gpu=Tensor(device, self.total, device.kind))
        self.num_computed_tokens = SimpleNamespace(gpu=Tensor(device, self.computed, device.kind))


@given(
    ready=st.lists(st.booleans(), min_size=1, max_size=60),
    batches=st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=10),
    every=st.integers(1, 7),
)
@settings(deadline=None)
def test_whenever_the_device_is_done(ready, batches, every):
    """A sample tells of one step, whole, whatever the device's pace; samples never go back, and one is under way at most."""
    device = Device("cuda")
    states, prompts = States(device, 8), np.arange(8, dtype=np.int32)
    area = memoryview(bytearray(layout.DEVICE_BYTES))
    sampler = DeviceSampler(states, area, every, device)
    said: dict[int, tuple[int, int, int]] = {}
    last = 0
    for step, done in enumerate(ready, 1):
        rows = sorted(batches[step % len(batches)])
        states.total[:] = step * 10 + prompts
        states.computed[:] = step * 10
        said[step] = (int(states.total[rows].sum()), int(states.computed[rows].sum()), len(rows))
        cached = SimpleNamespace(num_output_tokens=[step * 10] * len(rows), num_computed_tokens=[step * 10] * len(rows))
        if done:
            device.finish()
        sampler.step(step, cached, prompts, rows)
        assert len(device.queue) <= 3
        sample = np.frombuffer(area, layout.DEVICE_DTYPE, 1)[0]
        assert sample["sequence"] % 2 == 0
        assert last <= sample["step"] < step or sample["step"] == 0
        last = int(sample["step"])
        if last:
            assert (sample["total_sum"], sample["computed_sum"], sample["rows"]) == said[last]
            assert (sample["excess_rows"], sample["total_excess"], sample["computed_excess"]) == (0, 0, 0)
            assert last % every == 0
