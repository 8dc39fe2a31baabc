"""
Files with secrets: read only where nobody else can, and read anew once they have changed.
"""

import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from rankscope_exporter.serve.settings import SettingsError

logger = logging.getLogger("rankscope.exporter")

Value = TypeVar("Value")
Signature = tuple[tuple[int, int, int, int] | None, ...]


def check_private(path: Path, what: str) -> None:
    """
    See that only the owner and the group of a file can read or change it.

    Raises:
        SettingsError: others can, or there is no such file; `what` says what it holds.

    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        msg = f"{path}: cannot read the {what}: {error.strerror}"
        raise SettingsError(msg) from error
    # Group access stays allowed: secrets mounted into a pod are 0440 of the pod's own group.
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        msg = f"{path}: others can read or change this {what} (mode {stat.S_IMODE(mode):04o}); run `chmod 600 {path}`"
        raise SettingsError(msg)


def read_private_text(path: Path, what: str) -> str:
    """
    The text of a file with a secret, without white space around it.

    Raises:
        SettingsError: it cannot be read, or others can read it; `what` says what it holds.

    """
    check_private(path, what)
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: cannot read the {what}: {getattr(error, 'strerror', None) or error}"
        raise SettingsError(msg) from error


def signature(paths: Sequence[Path]) -> Signature:
    """
    What changes when one of the files is written, replaced, or has a link to it turned elsewhere.
    """
    return tuple(_signature(path) for path in paths)


def _signature(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116  # follows links: that is how mounted secrets are replaced
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Renewed(Generic[Value]):
    """
    A value made from files, and made anew when they change.

    Files are often replaced one after the other, so there are moments in which they do not fit together: until they can
    be used, the value stays what it was, and `problem` says why.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[], Value]) -> None:
        self._paths = tuple(paths)
        self._make = make
        self._seen = signature(self._paths)
        self.value = make()
        self.problem = ""

    def refresh(self) -> None:
        """
        Look at the files again. Nothing is raised: a problem is logged once and stays in `problem`.
        """
        seen = signature(self._paths)
        if seen == self._seen and not self.problem:
            return
        try:
            self.value = self._make()
        except SettingsError as error:
            problem = f"{error}; what was read before stays in use"
            if problem != self.problem:
                logger.error("%s", problem)  # noqa: TRY400  # the message says it all
            self.problem = problem
        else:
            self.problem = ""
            logger.warning("read anew: %s", ", ".join(map(str, self._paths)))
        self._seen = seen
