"""
The keeper of one child: it starts the command, and ends it with everything that it started, whatever happens above it.

A wedged vLLM worker spins and survives SIGTERM, and a worker whose parent was killed belongs to nobody. So the keeper
is a subreaper: orphans of its child become its own children, and its process tree is all there is. It ends the tree when
its standard input closes (its starter is gone, also by SIGKILL), on SIGTERM or SIGINT, and when the command exits.

It runs alone, before any package is importable: standard library only.
Exit status: that of the command, or 128 + the number of the signal that ended it.
"""

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
TRACKER = b"multiprocessing.resource_tracker"
"""
Python's resource tracker unlinks shared memory once the processes that used it are gone: it gets the time to do so.
"""
TRACKER_SECONDS = 3.0
POLL_SECONDS = 0.05


def descendants(root: int) -> list[int]:
    """
    Process ids below `root`, zombies left out.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    left = [root]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Keeper:
    """
    Starts the command, waits, ends the tree.
    """

    def __init__(self, command: list[str], grace: float) -> None:
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(self._woken)
        self._told = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._tell)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._grace = grace
        self._status: int | None = None
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL).pid

    def _tell(self, *_: object) -> None:
        self._told = True

    def run(self) -> int:
        """
        Wait for an end, then see to it.
        """
        self._reap()
        while self._status is None and not self._told:
            ready, _, _ = select.select([self._wake, sys.stdin.fileno()], [], [])
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
            self._reap()
            if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
                break
        self._end()
        return 1 if self._status is None else self._status

    def _reap(self) -> bool:
        """
        Collect who has ended; False once there are no children left.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self._child:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code

    def _end(self) -> None:
        if self._status is None:
            _signal([self._child], signal.SIGTERM)
            self._wait(self._grace, lambda: self._status is not None)
        # Whoever is left has had its chance. One that is just being started may be missed: hence again and again.
        deadline = time.monotonic() + TRACKER_SECONDS
        while self._reap():
            late = time.monotonic() > deadline
            _signal([pid for pid in descendants(os.getpid()) if late or not _is_tracker(pid)], signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while self._reap() and not until() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def main() -> int:
    """
    `python keeper.py [--grace SECONDS] [--nice N] [--remove DIRECTORY] -- COMMAND...`.
    """
    parser = argparse.ArgumentParser(
        description="Run a command, and end it with its whole tree once standard input closes."
    )
    parser.add_argument("--grace", type=float, default=5.0, help="seconds between SIGTERM and SIGKILL (default: 5)")
    parser.add_argument("--nice", type=int, default=0, help="niceness of the command (default: 0)")
    parser.add_argument("--remove", action="append", default=[], help="directory to remove at the end")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        print(f"cannot become a subreaper: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 1
    os.nice(options.nice)
    try:
        return Keeper(options.command, options.grace).run()
    finally:
        for directory in options.remove:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
