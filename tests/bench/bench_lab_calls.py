"""
System calls of the workers of a real vLLM, hooks on against hooks off: none of a step's calls is ours.

Both ranks run under steady traffic while strace writes down what the thread of their steps calls. A small plugin
(`step_marks`) marks where the model runner is entered and left, and takes the hooks off and puts them on again every
few steps, so that what the machine does beside it falls on both alike. Calls by which a thread waits depend on the
peer and not on the step; they stand in the detail. Needs the lab's environment (`make lab-setup`), strace, and leave to
trace other processes.
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
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from figures import Figures, progress
from step_marks import MARK, METHODS

from rankscope_exporter.flight import FlightFile, list_flight_files
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
Calls of a thread that waits: how many there are depends on how long it does.
"""
SECONDS = 240.0
"""
How long the steps may take while they are traced.
"""
_CALL, _MARKED = re.compile(r"(\w+)\("), re.compile(rf'"{MARK}/(begin|end)/(on|off)"')


class TraceError(RuntimeError):
    """
    The workers cannot be traced, or do not go on; the message says what is missing.
    """


@dataclass
class Tally:
    """
    What was called inside the model runner, over `entered` calls of its methods.
    """

    entered: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def per_step(self, name: str) -> float:
        """
        Calls of `name` in a step.
        """
        return self.calls[name] * len(METHODS) / self.entered if self.entered else 0.0


def tally(trace: Iterable[str]) -> dict[str, Tally]:
    """
    System calls of one thread between the marks, with hooks `on` and `off`; what lies outside of them is not the step's.
    """
    found = {"on": Tally(), "off": Tally()}
    inside: Counter[str] | None = None  # of a call that was seen from its beginning
    for line in trace:
        if mark := _MARKED.search(line):
            edge, word = mark.groups()
            if edge == "begin":
                inside = Counter()
            elif inside is not None:
                found[word].entered += 1
                found[word].calls += inside
                inside = None
        elif inside is not None and (call := _CALL.match(line)):
            inside[call[1]] += 1
    return found


def compare(on: Tally, off: Tally) -> tuple[float, dict[str, tuple[float, float]]]:
    """
    Calls per step that are more with hooks on, those by which a thread waits left out; and all of them, off and on, by name.
    """
    names = sorted(on.calls.keys() | off.calls.keys())
    table = {name: (round(off.per_step(name), 3), round(on.per_step(name), 3)) for name in names}
    more = sum(on.per_step(name) - off.per_step(name) for name in names if name not in WAITING)
    return round(more, 3), table


@contextlib.contextmanager
def strace(pid: int, trace: Path) -> Iterator[None]:
    """
    Write down the calls of the main thread of `pid` while this holds: a worker takes its steps in it.
    """
    tracer = subprocess.Popen(["strace", "-p", str(pid), "-o", str(trace)], stderr=subprocess.PIPE, text=True)
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


def install_marks(directory: Path) -> None:
    """
    Make `directory`, as a part of Python's path, a distribution that vLLM takes `step_marks` from.
    """
    shutil.copy(Path(__file__).with_name("step_marks.py"), directory)
    about = directory / "step_marks-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: step-marks\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nstep_marks = step_marks:register\n")


def wait_for_steps(path: Path, steps: int) -> None:
    """
    Wait until the rank of this flight file has taken `steps` more steps with hooks on.

    Raises:
        TraceError: it does not.

    """
    with FlightFile(path) as flight:
        last, until = flight.step() + steps, time.monotonic() + SECONDS
        while flight.step() < last:
            if time.monotonic() > until:
                msg = f"step {flight.step()} of {last} after {SECONDS:.0f} s: the engine hangs, or the machine is too busy"
                raise TraceError(msg)
            time.sleep(0.2)


def measure(lab: environment.Environment, steps: int) -> dict[str, dict[str, Tally]]:
    """
    What each rank calls in steps with hooks on and off, about `steps` of each.
    """
    checkpoints = checkpoint.ensure(environment.REPOSITORY / "var" / "lab" / "checkpoints", lab.python)
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory(dir="/dev/shm") as flight:
        work = Path(temporary)
        install_marks(work)
        options = EngineOptions(
            python=lab.python, checkpoints=checkpoints, name="lab_calls", speculation=False,
            environment={"RANKSCOPE_FLIGHT_DIR": flight, "PYTHONPATH": temporary},
        )  # fmt: skip
        with Engine(options, work / "engine.log") as engine, contextlib.ExitStack() as tracers:
            progress("lab_calls: starting vLLM")
            engine.wait_ready(420.0, progress)
            plan = Plan((Phase("steady", float("inf"), (Stream("steady", lengths=(400, 600), running=8),)),), seed=1)
            # The traffic never ends by itself: it does with the engine, and is not waited for.
            threading.Thread(target=run, args=(engine.url, plan), daemon=True).start()
            files = list(list_flight_files(Path(flight)))
            ranks = {}
            for path in files:
                with FlightFile(path) as file:
                    ranks[f"pp{file.identity()['pp_rank']}"] = file.pid
            wait_for_steps(files[0], 2 * steps // 10)
            for rank, pid in ranks.items():
                tracers.enter_context(strace(pid, work / rank))
            progress(f"lab_calls: {steps} steps with hooks, and as many without")
            wait_for_steps(files[0], steps)
            tracers.close()
            return {rank: tally((work / rank).read_text(errors="replace").splitlines()) for rank in sorted(ranks)}


def main() -> int:
    """
    Print the figure.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="steps that are traced, with hooks and without")
    steps = parser.parse_args().steps
    lab = environment.default(os.environ)
    if not lab.ready():
        progress("no lab environment: run `make lab-setup`")
        return 2
    if shutil.which("strace") is None:
        progress("strace is not installed (Debian package `strace`)")
        return 2
    figures = Figures("lab_calls")
    found = measure(lab, steps)
    compared = {rank: compare(each["on"], each["off"]) for rank, each in found.items()}
    enough = all(each[word].entered >= steps for each in found.values() for word in ("on", "off"))
    figures.report(
        "calls_per_step_that_are_ours", max(more for more, _ in compared.values()) if enough and compared else None, "<= 0.1",
        more={rank: more for rank, (more, _) in compared.items()},
        entered={rank: {word: each[word].entered for word in each} for rank, each in found.items()},
        off_and_on={rank: table for rank, (_, table) in compared.items()},
    )  # fmt: skip
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
