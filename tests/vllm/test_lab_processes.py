"""
The keeper ends what it was given, with everything below it: stubborn, orphaned, or without a starter.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope_lab.processes import MARK, Child, alive, marked, started, sweep

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
open(sys.argv[1] + f"/{os.getpid()}", "w").close()
time.sleep(600)
"""
"""
Ignores SIGTERM, and so does its grandchild, which is an orphan in a session of its own.
"""


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """`child(*command)` is one that is started, and ended with the test."""
    started_ones: list[Child] = []

    def start(*command: str, grace: float = 0.2) -> Child:
        child = Child(command, dict(os.environ), tmp_path / "log", grace_seconds=grace)
        started_ones.append(child)
        child.start()
        return child

    yield start
    for one in started_ones:
        one.stop()


def test_stop_ends_a_tree_that_ignores_sigterm(child: Callable[..., Child], tmp_path: Path) -> None:
    """A stubborn command and its orphaned grandchild are both gone after `stop`."""
    pids = tmp_path / "pids"
    pids.mkdir()
    tree = child(sys.executable, "-c", STUBBORN, str(pids))
    until(lambda: len(list(pids.iterdir())) == 2)
    assert len(tree.pids()) >= 2
    tree.stop()
    assert marked(tree.run_id) == []
    assert [pid.name for pid in pids.iterdir() if started(int(pid.name)) is not None] == []


def test_the_tree_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    """A supervisor that is killed with SIGKILL takes the tree along, and its scratch directory."""
    pids, scratch = tmp_path / "pids", tmp_path / "scratch"
    pids.mkdir()
    scratch.mkdir()
    program = (
        "import os, sys, time; from pathlib import Path; from rankscope_lab.processes import Child\n"
        "command = [sys.executable, '-c', sys.argv[1], sys.argv[2]]\n"
        "child = Child(command, dict(os.environ), Path(sys.argv[2] + '.log'), grace_seconds=0.2, remove=[Path(sys.argv[3])], run_id=sys.argv[4])\n"
        "child.start(); time.sleep(600)"
    )
    run_id = f"test-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", program, STUBBORN, str(pids), str(scratch), run_id]) as starter:
        until(lambda: len(list(pids.iterdir())) == 2)
        starter.send_signal(signal.SIGKILL)
    until(lambda: marked(run_id) == [])
    assert not scratch.exists()


def test_the_exit_status_of_the_command_comes_through(child: Callable[..., Child]) -> None:
    """What the command returns is what the child says, and a signal is 128 plus its number."""
    plain = child(sys.executable, "-c", "raise SystemExit(7)")
    killed = child(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    until(lambda: plain.exit_status() is not None and killed.exit_status() is not None)
    assert (plain.exit_status(), killed.exit_status()) == (7, 128 + signal.SIGKILL)


def test_a_command_that_ends_by_itself_leaves_nobody(child: Callable[..., Child]) -> None:
    """When the command exits, what it left in the background is ended too."""
    left = child(
        sys.executable,
        "-c",
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
    )
    until(lambda: left.exit_status() is not None)
    assert marked(left.run_id) == []


def test_sweep_kills_marked_processes_only() -> None:
    """What carries the mark is killed, what carries another is not."""
    commands = {
        run: [sys.executable, "-c", "import time; time.sleep(600)"]
        for run in (f"mine-{os.getpid()}", f"other-{os.getpid()}")
    }
    mine, other = (subprocess.Popen(command, env={**os.environ, MARK: run}) for run, command in commands.items())
    try:
        until(lambda: all(marked(run) for run in commands))
        assert sweep(f"mine-{os.getpid()}") == 1
        assert mine.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_a_process_is_known_by_its_start() -> None:
    """A pid that was given to another process is not taken for the old one."""
    start = started(os.getpid())
    assert start is not None
    assert alive(os.getpid(), start)
    assert not alive(os.getpid(), start + 1)
