"""
Processes of the lab: started under a keeper, found again by the mark in their environment.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankscope_lab import keeper

MARK = "RANKSCOPE_LAB_RUN"
"""
Environment variable that every process of the lab carries; its value names the child that it belongs to.
"""
SWEEP_SECONDS = 10.0
LOG_COLUMNS = 240
"""
vLLM prints its whole configuration in one line: what is quoted of a log is cut here.
"""


def marked(value: str | None = None) -> list[int]:
    """
    Ids of processes that carry the mark (with `value`, or with any), zombies and this process left out.
    """
    wanted = f"{MARK}={value or ''}".encode()
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _carries(pid, wanted, whole=value is not None)]


def _carries(pid: int, wanted: bytes, *, whole: bool) -> bool:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(pair == wanted if whole else pair.startswith(wanted) for pair in pairs)


def sweep(value: str | None = None) -> int:
    """
    Kill what carries the mark, until nothing does; returns how many processes that were.

    Raises:
        RuntimeError: some cannot be killed.

    """
    wanted = f"{MARK}={value or ''}".encode()
    killed: set[int] = set()
    deadline = time.monotonic() + SWEEP_SECONDS
    while pids := marked(value):
        if time.monotonic() > deadline:
            msg = f"processes of the lab that do not end: {', '.join(map(str, pids))}; they may belong to another user"
            raise RuntimeError(msg)
        for pid in pids:
            # The descriptor holds the process: a pid that was given to somebody else meanwhile is not hit.
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                try:
                    if _carries(pid, wanted, whole=value is not None):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        killed.add(pid)
                finally:
                    os.close(descriptor)
        time.sleep(0.05)
    return len(killed)


def started(pid: int) -> int | None:
    """
    When a process started, in clock ticks since boot; None if there is no such process, or only its zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[19])


def alive(pid: int, start: int) -> bool:
    """
    Whether the process that had this id and started then is still there.
    """
    return started(pid) == start


def free_port() -> int:
    """
    A loopback port that is free now.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(slots=True)
class Child:
    """
    A command under a keeper: it ends for certain, with all that it started, at `stop` or when this process is gone.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    grace_seconds: float = 5.0
    niceness: int = 0
    """How far it steps back behind others who want a processor (0 to 19)."""
    remove: Sequence[Path] = ()
    """Directories that go when the command ends."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """
        Start it; standard output and error go to the log file.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [
            sys.executable,
            "-S",
            "-E",
            keeper.__file__,
            "--grace",
            str(self.grace_seconds),
            "--nice",
            str(self.niceness),
        ]
        for directory in self.remove:
            arguments += ["--remove", str(directory)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*arguments, "--", *self.command],
                env={**self.environment, MARK: self.run_id},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_status(self) -> int | None:
        """
        None while it runs (or before its start), then its exit status.
        """
        return None if self._process is None else self._process.poll()

    def pids(self) -> list[int]:
        """
        Ids of its processes, the keeper's left out.
        """
        return [] if self._process is None else [pid for pid in marked(self.run_id) if pid != self._process.pid]

    def stop(self) -> None:
        """
        End it and everything that it started. Does nothing if it has ended.
        """
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(self.grace_seconds + keeper.TRACKER_SECONDS + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        sweep(self.run_id)

    def log_tail(self, lines: int = 30) -> str:
        """
        The last lines of its log.
        """
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(line[:LOG_COLUMNS] for line in text.splitlines()[-lines:])
