"""
The bytes of a flight file that another process owns, and may cut, replace or remove at any time.

Nothing is mapped for reading. A map of a file that shrinks kills its reader with a bus error at the next touch, and no
check beforehand can rule that out; `pread` gives fewer bytes instead, which is an error like any other. On a memory
file system it costs about a microsecond more.
"""

import mmap
import os
import stat
import weakref
from pathlib import Path

from rankscope_exporter.flight.errors import FlightError

# Without O_NONBLOCK opening a pipe would wait for its writer. A link in the flight directory could lead anywhere.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class FlightSource:
    """
    A regular file, opened for reading by position, and with `writable` for storing words.

    Raises:
        FlightError: it cannot be opened, or is a link, a pipe, a device or a directory.

    """

    __slots__ = ("__weakref__", "_close", "_descriptor", "name", "size")

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.name = path.name
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                msg = f"{self.name}: not a regular file"
                raise FlightError(msg)
            descriptor = os.open(path, _FLAGS | (os.O_RDWR if writable else os.O_RDONLY))
        except OSError as error:
            msg = f"{self.name}: {error.strerror}"
            raise FlightError(msg) from error
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):  # replaced since it was looked at
            self.close()
            msg = f"{self.name}: not a regular file"
            raise FlightError(msg)
        self.size = status.st_size
        """Size when it was opened."""

    def close(self) -> None:
        """
        Close the file; later reads are errors. Is idempotent.
        """
        self._descriptor = -1
        self._close()

    def read(self, offset: int, size: int) -> bytes:
        """
        The `size` bytes at `offset`.

        Raises:
            FlightError: the file was cut short or closed.

        """
        try:
            raw = os.pread(self._descriptor, size, offset)
        except OSError as error:
            msg = f"{self.name}: {error.strerror}"
            raise FlightError(msg) from error
        if len(raw) < size:
            raise self._cut_short()
        return raw

    def store(self, offset: int, word: int) -> None:
        """
        Store an aligned word of 64 bits, whole: no reader ever sees a part of it.

        This is the one place that maps the file, as a write call promises nothing of the kind. A file that is cut between
        the check here and the store would end this process; only its owner can do that.

        Raises:
            FlightError: the file was cut short, closed, or not opened as `writable`.

        """
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = offset + 8 - start
        try:
            if os.fstat(self._descriptor).st_size < offset + 8:
                raise self._cut_short()
            with (
                mmap.mmap(self._descriptor, length, access=mmap.ACCESS_WRITE, offset=start) as area,
                memoryview(area) as everything,
                everything[-8:] as last,
                last.cast("Q") as words,
            ):
                words[0] = word
        except OSError as error:
            msg = f"{self.name}: {error.strerror}"
            raise FlightError(msg) from error

    def _cut_short(self) -> FlightError:
        return FlightError(f"{self.name}: cut short while it was read")
