"""
Do the hooks and the sampling of device-side lengths synchronize anything on a CUDA GPU, and what do they cost there?

    python3 tests/cuda/bench_hooks.py --vllm-source DIRECTORY

DIRECTORY holds `vllm/v1/worker/gpu/pp_utils.py` of a release (an unpacked wheel, or an installation's site-packages).
One GPU is enough. Steps run beside a busy stream with PyTorch's synchronization debug mode set to `error`; the profiler
lists the runtime calls with hooks on and off; and host and device time of a step are compared. One JSON line a figure.
"""

import argparse
import collections
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(Path(__file__).parent),
    str(ROOT / "tests" / "bench"),
    str(ROOT / "tests" / "support"),
    str(ROOT / "exporter"),
]

from figures import Figures, progress
from pipeline import SLOTS, Runner, load_handler_module
from standin import identity

from rankscope_exporter.contract import HookState
from rankscope_exporter.flight import FlightFile
from rankscope_exporter.hooks.install import Installation, install
from rankscope_exporter.settings import WorkerSettings

SAMPLE_EVERY, TIMED_EVERY = 8, 64
"""
Steps between two samples: often where waits are looked for, and as rarely as an operator would where time is measured.
"""
STEPS = 2000
BLOCK = 8
DEVICE_GOAL = "<= 1.02"
"""
Ratios between 0.995 and 1.011 were seen for the same code: less than that is the measurement's own noise.
"""
BUSY, WORK = 4096, 30
"""
Size and number of a step's matrix products where time is measured: the device takes longer for a step than the host.
"""
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""
Runtime calls in which the host waits for the device.
"""


def take_steps(runner: Runner, steps: int) -> None:
    """
    What a worker does with one scheduler output after another.
    """
    for _ in range(steps):
        output = runner.schedule()
        runner.execute_model(output)
        runner.sample_tokens(None)


def with_sync_as_error(body: Callable[[], None]) -> str:
    """
    Run `body` with every synchronizing operation of PyTorch turned into an error; that error, or nothing.
    """
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        body()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return ""


def runtime_calls(runner: Runner, steps: int) -> collections.Counter[str]:
    """
    CUDA runtime calls of `steps` steps, by name, as the profiler saw them.
    """
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        take_steps(runner, steps)
    found: collections.Counter[str] = collections.Counter()
    for event in profile.events():
        if event.name.startswith("cuda"):
            found[event.name] += 1
    return found


def host_times(runners: dict[str, Runner], rounds: int) -> dict[str, float]:
    """
    Microseconds of a step of each runner on the host, which only enqueues; median. The runners take turns, step by step.
    """
    found: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(rounds):
        for name, runner in runners.items():
            entered = time.perf_counter_ns()
            take_steps(runner, 1)
            found[name].append((time.perf_counter_ns() - entered) / 1e3)
        if not turn % BLOCK:
            torch.cuda.synchronize()  # the device's queue is finite, and a full one would be waited for
    return {name: statistics.median(values) for name, values in found.items()}


def device_times(runners: dict[str, Runner], blocks: int) -> dict[str, float]:
    """
    Microseconds of a step of each runner on the device; median of blocks of steps, in which the runners take turns.
    """
    found: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(blocks):
        for name, runner in runners.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            take_steps(runner, 2)  # the stream is busy when the block begins
            begin.record()
            take_steps(runner, BLOCK)
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3 / BLOCK)
    return {name: statistics.median(values) for name, values in found.items()}


def own_time(installation: Installation) -> float:
    """
    Microseconds that the hooks measured of themselves in a step; median of the steps in which they did.
    """
    with FlightFile(installation.flight.path) as flight:
        own = flight.records()["own_ns"]
    return float(statistics.median(own[own > 0].tolist())) / 1e3


def set_up(runner: Runner, directory: str, *, every: int, last_rank: bool) -> Installation:
    """
    The real hooks on `runner`, with device-side lengths sampled every `every` steps.
    """
    settings = WorkerSettings(flight_dir=Path(directory), device_lengths_steps=every)
    who = identity(engine="cuda", pp_rank=int(last_rank), pid=os.getpid(), runner="V2", device="cuda")
    installation = install(runner, who, settings)
    off = {r.hook: r.reason for r in installation.hooks.values() if r.state is HookState.OFF}
    assert installation.recorder is not None
    assert not off, off
    return installation


def measure(figures: Figures, module: object, device: torch.device, *, last_rank: bool, blocks: int) -> None:
    """
    All figures of one side of the exchange.
    """
    side = "sender" if last_rank else "receiver"
    progress(f"cuda: {side}")
    runner = Runner(module, device, last_rank=last_rank, size=1024, work=6)
    take_steps(runner, 64)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        off_calls = runtime_calls(runner, 256)
        installation = set_up(runner, directory, every=SAMPLE_EVERY, last_rank=last_rank)
        take_steps(runner, 64)
        problem = with_sync_as_error(lambda: take_steps(runner, STEPS))
        figures.report(f"{side}_synchronizing_operations", int(bool(problem)), "<= 0", steps=STEPS, first=problem)
        figures.report(f"{side}_faults", installation.faults.total, "<= 0", kinds=installation.faults.kinds)
        on_calls = runtime_calls(runner, 256)
        added = {
            name: on_calls[name] - off_calls[name] for name in on_calls | off_calls if on_calls[name] != off_calls[name]
        }
        waiting = sum(added.get(name, 0) for name in WAITING)
        figures.report(f"{side}_waiting_calls_added", waiting, "<= 0", steps=256, added=added)
        take_steps(runner, SAMPLE_EVERY)
        torch.cuda.synchronize()
        take_steps(runner, 1)
        with FlightFile(installation.flight.path) as flight:
            sample, records = flight.device_lengths(), flight.records()
        figures.report(
            f"{side}_device_samples", int(sample["samples"]), ">= 200", rows=int(sample["rows"]), step=int(sample["step"]),
            last_step=int(records["step"][-1]), total_excess=int(sample["total_excess"]), computed_excess=int(sample["computed_excess"]),
        )  # fmt: skip
        figures.report(
            f"{side}_records_agree", int((records["guard"] == 1).all() and (records["width"] == 4).all() and (records["posted"] == 3).all()), ">= 1",
            records=len(records), completed_total=int(records["completed_total"][-1]), posted_total=int(records["posted_total"][-1]),
        )  # fmt: skip
        installation.uninstall()
        every = {"off": None, "hooks": 0, "hooks and device": TIMED_EVERY}
        runners = {name: Runner(module, device, last_rank=last_rank, size=BUSY, work=WORK) for name in every}
        installed = [
            set_up(runners[name], f"{directory}/{steps}", every=steps, last_rank=last_rank)
            for name, steps in every.items()
            if steps is not None
        ]
        host, on_device = host_times(runners, blocks * BLOCK), device_times(runners, blocks)
        for name, installation in zip(("hooks", "hooks and device"), installed, strict=True):
            label = f"{side}_{name.replace(' ', '_')}"
            detail = {"host_us": round(host[name], 1), "host_off_us": round(host["off"], 1)}
            figures.report(f"{label}_host_us_per_step", round(host[name] - host["off"], 1), "<= 100", **detail)
            # Every other measured step is one that samples, so this is what such a step costs, not the mean.
            goal = "<= 100" if name == "hooks" else ""
            figures.report(f"{label}_own_us", round(own_time(installation), 1), goal, requests=SLOTS)
            detail = {"device_us": round(on_device[name], 1), "device_off_us": round(on_device["off"], 1)}
            figures.report(
                f"{label}_device_time_ratio", round(on_device[name] / on_device["off"], 4), DEVICE_GOAL, **detail
            )
        for installation in installed:
            installation.uninstall()


def main() -> int:
    """
    Print the figures; 1 if one misses its goal, 2 if there is no GPU or no source.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-source", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--blocks", type=int, default=100)
    arguments = parser.parse_args()
    path = arguments.vllm_source / "vllm" / "v1" / "worker" / "gpu" / "pp_utils.py"
    if not torch.cuda.is_available() or not path.exists():
        what = (
            "no CUDA GPU here" if path.exists() else f"{path} is not there: unpack a vLLM wheel, or name site-packages"
        )
        sys.stderr.write(f"bench_hooks: {what}\n")
        return 2
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    module = load_handler_module(path)
    figures = Figures("cuda")
    control = with_sync_as_error(lambda: torch.ones(1, device=device).item())
    figures.report("debug_mode_notices_a_wait", int(bool(control)), ">= 1", message=control)
    for last_rank in (False, True):
        measure(figures, module, device, last_rank=last_rank, blocks=arguments.blocks)
    torch.distributed.destroy_process_group()
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
