"""
The ground that a soak stands on: mounts of its own, a flight directory that can be full, temporary files apart.

With a mount namespace, the flight directory is a small tmpfs and `/dev/shm` is empty at the start, and both go with the
last process of the soak, however it ends. Where none may be made (neither root nor user namespaces), a file stands in
place of the directory while it shall take no rank, and what others leave in `/dev/shm` cannot be told from ours.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PRIVATE = "RANKSCOPE_SOAK_PRIVATE"
"""
Set in the namespace.
"""
SHARED_MEMORY = Path("/dev/shm")
SPARE_FILES = 16
"""
Flight files that the directory has room for, when it has room.
"""


def enter_namespace() -> None:
    """
    Start this program again in a mount namespace of its own, if one may be made; otherwise go on as before.
    """
    if PRIVATE in os.environ or not (unshare := shutil.which("unshare")):
        return
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    enter = [unshare, *user, "--mount", "--propagation", "private", "--"]
    probe = [*enter, "mount", "-t", "tmpfs", "none", str(SHARED_MEMORY)]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        return
    mount = f'mount -t tmpfs none {SHARED_MEMORY} && exec "$@"'
    os.execve(unshare, [*enter, "sh", "-c", mount, "sh", sys.executable, *sys.argv], {**os.environ, PRIVATE: "1"})


class Ground:
    """
    The directories of a soak. `flight` is where flight files go, `work` holds logs, `temporary` is everybody's TMPDIR.
    """

    def __init__(self, file_bytes: int) -> None:
        self.private = PRIVATE in os.environ
        self.work = Path(
            tempfile.mkdtemp(prefix="soak-")
        )  # short: vLLM's sockets lie below it, and their paths are limited
        self.temporary = self.work / "t"
        self.temporary.mkdir()
        self.flight = self.work / "flight"
        self.flight.mkdir(mode=0o700)
        self._shared_before = set(SHARED_MEMORY.iterdir())
        if self.private:
            size = f"size={SPARE_FILES * file_bytes},mode=0700"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(self.flight)], check=True)
        self._filler = self.flight / "filler" if self.private else self.flight

    @property
    def how(self) -> str:
        """How room is taken away, in words."""
        return "a tmpfs with no block left" if self.private else "a file in place of the directory (no mount namespace)"

    def fill(self) -> None:
        """
        Leave no room for a flight file.

        Raises:
            RuntimeError: there is some nevertheless.

        """
        if not self.private:
            self.flight.rmdir()
            self.flight.touch()
            return
        with self._filler.open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, self._free())
        if self._free():
            msg = f"{self.flight} still has {self._free()} bytes after it was filled"
            raise RuntimeError(msg)

    def _free(self) -> int:
        status = os.statvfs(self.flight)
        return status.f_bavail * status.f_frsize

    def make_room(self) -> None:
        """
        Undo `fill`.
        """
        self._filler.unlink()
        self.flight.mkdir(mode=0o700, exist_ok=True)

    def flight_entries(self) -> list[str]:
        """
        Names in the flight directory, what is of ours left out.
        """
        if not self.flight.is_dir():
            return []
        return sorted(path.name for path in self.flight.iterdir() if path != self._filler)

    def left_in_shared_memory(self) -> list[str]:
        """
        Names in `/dev/shm` that were not there at the start.
        """
        return sorted(path.name for path in set(SHARED_MEMORY.iterdir()) - self._shared_before)

    def left_in_temporary(self) -> list[str]:
        """
        Names in the directory for temporary files.
        """
        return sorted(path.name for path in self.temporary.iterdir())

    def remove(self) -> None:
        """
        Take everything away.
        """
        if self.private:
            subprocess.run(["umount", str(self.flight)], check=False)
        shutil.rmtree(self.work, ignore_errors=True)
