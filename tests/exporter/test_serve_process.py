"""
Telling the life of a rank's process.
"""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from rankscope_exporter.contract import RankLife
from rankscope_exporter.flight.writer import process_start_ticks
from rankscope_exporter.serve.process import life_of, read_life


def stat(state: str, start: int, name: str = "python") -> bytes:
    return f"42 ({name}) {state} {' '.join(['1'] * 18)} {start} 0 0\n".encode()


@pytest.mark.parametrize(
    ("state", "life"),
    [
        ("R", RankLife.RUNNING), ("S", RankLife.RUNNING), ("D", RankLife.RUNNING), ("T", RankLife.STOPPED), ("t", RankLife.STOPPED),
        ("Z", RankLife.GONE), ("X", RankLife.GONE),
    ],
)  # fmt: skip
def test_state(state: str, life: RankLife) -> None:
    """The kernel's letter decides."""
    assert life_of(stat(state, 777), 777) is life


def test_reused_pid() -> None:
    """A process with the same pid and another start time is not the rank."""
    assert life_of(stat("R", 778), 777) is RankLife.GONE


def test_unknown_start() -> None:
    """Where the start time is not known, the pid has to do."""
    assert life_of(stat("R", 778), 0) is RankLife.RUNNING


def test_odd_command_name() -> None:
    """A command name with parentheses and spaces does not shift the fields."""
    assert life_of(stat("T", 777, name="a) R 1 (b"), 777) is RankLife.STOPPED


@pytest.mark.parametrize("text", [None, b"", b"42 (python) R 1"])
def test_no_process(text: bytes | None) -> None:
    """No file, or one that is cut short, means that the process is gone."""
    assert life_of(text, 777) is RankLife.GONE


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.integration
def test_real_process(child: "subprocess.Popen[bytes]") -> None:
    """A real process runs, is stopped by a signal, is continued, and is gone as soon as it is killed, also unreaped."""
    start = process_start_ticks(child.pid)
    assert start is not None

    assert read_life(child.pid, start) is RankLife.RUNNING

    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert read_life(child.pid, start) is RankLife.STOPPED

    os.kill(child.pid, signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
    assert read_life(child.pid, start) is RankLife.RUNNING

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_life(child.pid, start) is RankLife.GONE
    child.wait()
    assert read_life(child.pid, start) is RankLife.GONE
