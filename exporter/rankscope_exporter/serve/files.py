"""
The flight files of a node, opened and kept open from one answer to the next.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from rankscope_exporter.collectors.reading import RankMemo
from rankscope_exporter.contract import RankIdentity, Unreadable
from rankscope_exporter.flight import FlightError, FlightFile
from rankscope_exporter.flight.layout import SUFFIX, file_bytes


@dataclass(frozen=True, slots=True)
class OpenFile:
    """
    A flight file that is open, and whose identity was read.
    """

    flight: FlightFile
    memo: RankMemo
    inode: tuple[int, int]

    @property
    def identity(self) -> RankIdentity:
        """Who the rank is."""
        return self.memo.identity


@dataclass(frozen=True, slots=True)
class Scan:
    """
    What the flight directory holds at one moment, sorted by file name.
    """

    files: tuple[OpenFile, ...]
    unreadable: tuple[Unreadable, ...]


class FlightFiles:
    """
    Opens the flight files of `directory`, and forgets those that are gone. Not safe for threads.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, OpenFile] = {}

    def scan(self) -> Scan:
        """
        The files that are there now. A file that cannot be read is told of, never raised; no directory means no files.
        """
        found: dict[str, OpenFile] = {}
        unreadable: list[Unreadable] = []
        try:
            names = sorted(name for name in os.listdir(self.directory) if name.endswith(SUFFIX))  # noqa: PTH208  # names are all it takes
        except FileNotFoundError:
            names = []
        except OSError as error:
            names = []
            unreadable.append(
                Unreadable(path=str(self.directory), reason=f"cannot list the flight directory: {error.strerror}")
            )
        for name in names:
            try:
                if (file := self._look(name)) is not None:
                    found[name] = file
            except FlightError as error:  # noqa: PERF203  # one bad file must not hide the others
                unreadable.append(Unreadable(path=str(self.directory / name), reason=str(error)))
        for name, file in self._open.items():
            if name not in found or found[name].flight is not file.flight:
                file.flight.close()
        self._open = found
        return Scan(tuple(found.values()), tuple(unreadable))

    def _look(self, name: str) -> OpenFile | None:
        path = self.directory / name
        try:
            status = os.lstat(path)
        except FileNotFoundError:  # removed since it was listed
            return None
        except OSError as error:
            msg = f"{name}: {error.strerror}"
            raise FlightError(msg) from error
        # A link could lead anywhere, and opening a pipe would wait for its writer.
        if not stat.S_ISREG(status.st_mode):
            msg = f"{name}: not a regular file"
            raise FlightError(msg)
        inode = (status.st_dev, status.st_ino)
        known = self._open.get(name)
        if known is not None and known.inode == inode:
            if status.st_size < file_bytes(known.flight.ring_capacity):
                msg = f"{name}: cut short while it was read, {status.st_size} bytes are left"
                raise FlightError(msg)
            return known
        flight = FlightFile(path)
        try:
            memo = RankMemo(_identity(flight))
        except BaseException:
            flight.close()
            raise
        return OpenFile(flight, memo, inode)

    def close(self) -> None:
        """
        Close all files.
        """
        for file in self._open.values():
            file.flight.close()
        self._open = {}


def _identity(flight: FlightFile) -> RankIdentity:
    try:
        return RankIdentity.model_validate(flight.identity())
    except ValueError as error:
        msg = f"{flight.path.name}: the identity is damaged: {_first_error(error)}"
        raise FlightError(msg) from error


def _first_error(error: ValueError) -> str:
    lines = str(error).splitlines()
    return "; ".join(line.strip() for line in lines[1:3]) or str(error)
