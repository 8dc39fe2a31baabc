"""
System calls of the workers of a real vLLM, hooks on against hooks off: none of a step's calls is ours.

The same engine is started twice, with and without Rankscope, under the same traffic. strace counts the calls of each
worker and all of its threads over some hundred steps, which vLLM's own metrics count. Calls by which a process waits
go with time and not with steps; they stand in the detail. Needs the lab's environment (`make lab-setup`), strace, and
leave to trace other processes.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from figures import Figures, progress

from rankscope_lab import checkpoint, environment
from rankscope_lab.engine import Engine, EngineOptions
from rankscope_lab.traffic import Phase, Plan, Stream, run

WAITING = frozenset(
    {
        "sched_yield", "futex", "nanosleep", "clock_nanosleep", "poll", "ppoll", "select", "pselect6", "epoll_wait",
        "epoll_pwait", "restart_syscall",
    }
)  # fmt: skip
"""
Calls of a process that waits: how many there are depends on how long it does.
"""
ITERATIONS = "vllm:iteration_tokens_total_count"
"""
vLLM's count of its steps.
"""
SECONDS = 240.0
"""
How long the steps may take while they are traced.
"""

Calls = dict[str, float]


class TraceError(RuntimeError):
    """
    The workers cannot be traced, or do not go on; the message says what is missing.
    """


def workers(engine: Engine) -> dict[str, int]:
    """
    Process ids of the engine's workers by rank.
    """
    found = {}
    for pid in engine.pids():
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if match := re.search(r"Worker_PP(\d+)", title):
                found[f"pp{match[1]}"] = pid
    if not found:
        msg = "no worker processes were found by their titles"
        raise TraceError(msg)
    return found


def steps_of(engine: Engine) -> float:
    """
    Steps that the engine has taken.
    """
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    values = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(ITERATIONS)]
    if not values:
        msg = f"this vLLM has no metric {ITERATIONS}"
        raise TraceError(msg)
    return sum(values)


def read_summary(text: str) -> dict[str, int]:
    """
    Calls by name in what `strace -c` prints.
    """
    found = {}
    for line in text.splitlines():
        columns = line.split()
        if len(columns) >= 5 and columns[3].isdigit() and columns[-1] != "total":
            found[columns[-1]] = int(columns[3])
    return found


@contextlib.contextmanager
def strace(pid: int, summary: Path) -> Iterator[None]:
    """
    Count the calls of `pid` and its threads into `summary` while this holds.
    """
    command = ["strace", "-f", "-c", "-p", str(pid), "-o", str(summary)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert tracer.stderr is not None
        line = tracer.stderr.readline()
        if "attached" not in line:
            msg = f"strace cannot trace vLLM's worker: {line.strip()} (root, or kernel.yama.ptrace_scope=0, is needed)"
            raise TraceError(msg)
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        try:
            tracer.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            tracer.kill()
            tracer.communicate()


def count(engine: Engine, work: Path, steps: int) -> tuple[dict[str, Calls], float]:
    """
    Calls per step of each rank by name, over at least `steps` steps, and how many steps those were.
    """
    with contextlib.ExitStack() as tracers:
        ranks = workers(engine)
        for rank, pid in ranks.items():
            tracers.enter_context(strace(pid, work / rank))
        first = now = steps_of(engine)
        until = time.monotonic() + SECONDS
        while now - first < steps:
            if time.monotonic() > until:
                msg = f"{now - first:.0f} of {steps} steps in {SECONDS:.0f} s: the engine hangs, or the machine is too busy"
                raise TraceError(msg)
            time.sleep(0.2)
            now = steps_of(engine)
    taken = now - first
    summaries = {rank: read_summary((work / rank).read_text()) for rank in ranks}
    return {rank: {name: n / taken for name, n in found.items()} for rank, found in summaries.items()}, taken


def measure(
    lab: environment.Environment, rankscope: Mapping[str, str], steps: int
) -> tuple[dict[str, Calls], float]:
    """
    As `count`, of an engine with the environment `rankscope` under steady traffic.
    """
    checkpoints = checkpoint.ensure(environment.REPOSITORY / "var" / "lab" / "checkpoints", lab.python)
    with tempfile.TemporaryDirectory() as work:
        options = EngineOptions(
            python=lab.python, checkpoints=checkpoints, name="lab_calls", speculation=False, environment=rankscope
        )
        with Engine(options, Path(work) / "engine.log") as engine:
            engine.wait_ready(420.0, progress)
            plan = Plan((Phase("steady", float("inf"), (Stream("steady", lengths=(400, 600), running=8),)),), seed=1)
            # The traffic never ends by itself: it does with the engine, and is not waited for.
            threading.Thread(target=run, args=(engine.url, plan), daemon=True).start()
            time.sleep(5.0)
            return count(engine, Path(work), steps)


def compare(on: Calls, off: Calls) -> tuple[float, dict[str, tuple[float, float]]]:
    """
    Calls per step that are more with hooks on, those by which a process waits left out; and all of them, off and on, by name.
    """
    names = sorted(on.keys() | off.keys())
    table = {name: (round(off.get(name, 0.0), 3), round(on.get(name, 0.0), 3)) for name in names}
    more = sum(on.get(name, 0.0) - off.get(name, 0.0) for name in names if name not in WAITING)
    return round(more, 3), table


def main() -> int:
    """
    Print the figure.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps that are traced, with hooks and without")
    steps = parser.parse_args().steps
    lab = environment.default(os.environ)
    if not lab.ready():
        progress("no lab environment: run `make lab-setup`")
        return 2
    if shutil.which("strace") is None:
        progress("strace is not installed (Debian package `strace`)")
        return 2
    figures = Figures("lab_calls")
    found = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as flight:
        for name, switch in (("off", "0"), ("on", "1")):
            progress(f"lab_calls: vLLM with hooks {name}")
            found[name] = measure(lab, {"RANKSCOPE_ENABLED": switch, "RANKSCOPE_FLIGHT_DIR": flight}, steps)
    (off, off_steps), (on, on_steps) = found["off"], found["on"]
    compared = {rank: compare(on[rank], off[rank]) for rank in sorted(on)}
    figures.report(
        "calls_per_step_that_are_ours", max(more for more, _ in compared.values()), "<= 0.1",
        steps_off=off_steps, steps_on=on_steps, more={rank: more for rank, (more, _) in compared.items()},
        off_and_on={rank: table for rank, (_, table) in compared.items()},
    )  # fmt: skip
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
