"""
`rankscope-exporter run`: the command matters, the server beside it does not.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter.serve.child import exit_code
from rankscope_exporter.serve.settings import ServeSettings
from rankscope_exporter.serve.signals import is_for_child

pytestmark = pytest.mark.integration

Start = Callable[..., "subprocess.Popen[str]"]
WAIT = 300
"""Seconds until a process that should end counts as hanging: far more than a busy machine needs."""

TELLS_SIGNALS = """
import signal, sys
def tell(number, _):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, tell)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def start(flight_dir: Path, serve_settings: ServeSettings) -> Iterator[Start]:
    """Starts a Python program below `rankscope-exporter run`."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, *flags: str, **options: Any) -> "subprocess.Popen[str]":
        flags = flags or ("--port", "0")
        command = [
            sys.executable,
            "-m",
            "rankscope_exporter",
            "run",
            "--flight-dir",
            str(flight_dir),
            *flags,
            "--",
            sys.executable,
            "-c",
            program,
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
        )
        started.append(process)
        return process

    yield run
    for process in started:
        # The whole session: the command outlives `run` if that is killed, and would hold the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_exit_codes() -> None:
    """The child's own code, or 128 + n for a signal."""
    assert [exit_code(code) for code in (0, 3, -signal.SIGKILL)] == [0, 3, 137]


@pytest.mark.parametrize(
    ("program", "code"),
    [("raise SystemExit(0)", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_exit_code_of_the_command(start: Start, program: str, code: int) -> None:
    """It ends as the command ends."""
    assert start(program).wait(timeout=WAIT) == code


def test_output_is_the_commands_own(start: Start) -> None:
    """Standard output holds what the command writes and nothing else."""
    out, err = start("print('hello'); import time; time.sleep(1)").communicate(timeout=WAIT)

    assert out == "hello\n"
    assert "serving 0 ranks" in err


def test_flight_dir_in_the_environment(start: Start, flight_dir: Path) -> None:
    """The command's workers find the same flight directory."""
    out, _ = start("import os; print(os.environ['RANKSCOPE_FLIGHT_DIR'])").communicate(timeout=WAIT)

    assert out.strip() == str(flight_dir)


def test_serves_beside(start: Start, rank_file: Callable[..., Any]) -> None:
    """While the command runs, its ranks are served."""
    rank_file(0).steps(2)
    process = start("import sys; sys.stdin.read()", stdin=subprocess.PIPE)
    assert process.stderr is not None
    url = process.stderr.readline().split(" on ")[1].split()[0]

    with urllib.request.urlopen(f"{url}/metrics") as answer:
        assert b"rankscope_steps_total" in answer.read()
    out, _ = process.communicate(timeout=WAIT)
    assert (process.returncode, out) == (0, "")


def test_signals_pass_through(start: Start) -> None:
    """Each signal reaches the command once, and what the command makes of it decides."""
    process = start(TELLS_SIGNALS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGTERM"):
        process.send_signal(signal.Signals[name])
        assert process.stdout.readline() == f"{name}\n"

    assert process.wait(timeout=WAIT) == 7


def test_signals_of_a_terminal() -> None:
    """A signal that a terminal sends reaches the command by itself and is not sent twice; any other is passed on."""
    kernel, user, queue = 0x80, 0, -1

    assert [is_for_child(code) for code in (kernel, user, queue)] == [False, True, True]


def test_ctrl_c_in_a_terminal(start: Start) -> None:
    """Ctrl-C in a real terminal reaches the command once."""
    controller, terminal = os.openpty()
    # The alarm is set by the handler: a signal that came before the first pause would else be waited for for ever.
    program = TELLS_SIGNALS.replace(
        "if number == signal.SIGTERM", "signal.alarm(number == signal.SIGINT)\n    if number == signal.SIGTERM"
    ).replace("signal.SIGUSR1", "signal.SIGALRM")
    # A session of its own, whose terminal the process takes, as a login shell would.
    process = start(program, stdin=terminal, preexec_fn=lambda: _take_terminal(0))
    os.close(terminal)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.write(controller, b"\x03")
        lines = [process.stdout.readline(), process.stdout.readline()]
    finally:
        os.close(controller)

    assert lines == ["SIGINT\n", "SIGALRM\n"]


def _take_terminal(descriptor: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


def test_port_in_use(start: Start, tmp_path: Path) -> None:
    """A port that is taken is an error before the command is started."""
    mark = tmp_path / "started"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(f"open({str(mark)!r}, 'w')", "--port", str(taken.getsockname()[1]))
        _, err = process.communicate(timeout=WAIT)

    assert process.returncode == 2
    assert "Address already in use" in err
    assert not mark.exists()


@pytest.mark.parametrize(("command", "code"), [("/nonexistent/vllm", 127), ("/etc/passwd", 126)])
def test_command_that_cannot_be_started(command: str, code: int, flight_dir: Path) -> None:
    """A command that cannot be started is told of, with a shell's exit codes."""
    arguments = [
        sys.executable,
        "-m",
        "rankscope_exporter",
        "run",
        "--flight-dir",
        str(flight_dir),
        "--port",
        "0",
        "--",
        command,
    ]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=WAIT)

    assert done.returncode == code
    assert command in done.stderr


def test_failing_server(flight_dir: Path, serve_settings: ServeSettings) -> None:
    """The command goes on, and its exit code stands, when serving fails under it; the failure is logged."""
    program = """
import logging, os, sys
from rankscope_exporter.serve import signals
mask = signals.block()
from rankscope_exporter.serve import child
from rankscope_exporter.serve.server import Server
from rankscope_exporter.serve.settings import ServeSettings

async def fails(self, sockets=None):
    raise RuntimeError("on purpose")

logging.basicConfig()
Server.startup = fails
command = [sys.executable, "-c", "import sys; sys.stdin.read(); print('went on'); sys.exit(5)"]
sys.exit(child.run(command, ServeSettings(port=0), os.environ, mask))
"""
    environment = os.environ | {"RANKSCOPE_FLIGHT_DIR": str(flight_dir)}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    said = ""
    while "on purpose" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    out, _ = process.communicate(timeout=WAIT)

    assert (process.returncode, out) == (5, "went on\n")
    assert "the command goes on without it" in said
