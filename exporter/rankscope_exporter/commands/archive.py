"""
`rankscope-exporter copy`: flight files as they are now, kept for an incident.
"""

import contextlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO, TextIO

from rankscope_exporter.commands.ranks import find_files
from rankscope_exporter.commands.text import printable
from rankscope_exporter.flight import FlightError, FlightFile, whole_copy
from rankscope_exporter.flight.layout import LIVE_OFFSET, LIVE_STEP, SUFFIX, WORD

ARCHIVE_SUFFIXES = (".tar.gz", ".tgz")
WELL, NOT_WELL, WRONG = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Copied:
    """
    A copy in memory: the name that it gets, its bytes, and where they come from.
    """

    name: str
    content: bytes
    source: Path

    @property
    def step(self) -> int:
        """Last step in the copy."""
        step: int = WORD.unpack_from(self.content, LIVE_OFFSET + 8 * LIVE_STEP)[0]
        return step


def copy(places: Sequence[Path], destination: Path, now: float, out: TextIO, complain: Callable[[str], None]) -> int:
    """
    Copy the flight files at `places` into a directory or a new archive, named with the time `now`; the exit code.

    What can be copied is copied even if something else cannot. Nothing is overwritten.
    """
    paths, problems = find_files(places)
    if problem := refusal(paths, destination):
        complain(printable(problem))
        return WRONG
    copies = []
    names: set[str] = set()
    for path in paths:
        try:
            with FlightFile(path) as flight:
                content = whole_copy(flight)
        except FlightError as error:
            problems.append(str(error))
            continue
        name = copy_name(path, now, names)
        names.add(name)
        copies.append(Copied(name, content, path))
    if copies:
        try:
            if is_archive(destination):
                _write_archive(copies, destination, now)
            else:
                _write_directory(copies, destination)
        except OSError as error:
            problems.append(f"{error.filename or destination}: {error.strerror}")
            copies = []
    out.writelines(
        printable(f"{copied.source} -> {destination / copied.name}, last step {copied.step}") + "\n"
        for copied in copies
    )
    for problem in problems:
        complain(printable(problem))
    if not copies and not problems:
        complain("nothing to copy")
    return WELL if copies and not problems else NOT_WELL


def is_archive(destination: Path) -> bool:
    """
    Whether copies go into an archive, by the name.
    """
    return destination.name.endswith(ARCHIVE_SUFFIXES)


def refusal(paths: Sequence[Path], destination: Path) -> str | None:
    """
    Why nothing is copied there; None if it can be.
    """
    if is_archive(destination):
        return (
            f"{destination}: is there already, and nothing is overwritten; name another"
            if destination.exists()
            else None
        )
    if destination.exists() and not destination.is_dir():
        return f"{destination}: is a file; name a directory, or an archive that ends in .tar.gz"
    if destination.resolve() in {path.parent.resolve() for path in paths}:
        return f"{destination}: holds the files themselves, and an exporter would serve the copies as ranks; name another directory"
    return None


def copy_name(path: Path, now: float, taken: set[str]) -> str:
    """
    Name of a copy of `path`: with the time in UTC, and a number where two files of several directories have one name.
    """
    moment = datetime.fromtimestamp(now, timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    stem = f"{path.name.removesuffix(SUFFIX)}.{moment}"
    name, number = f"{stem}{SUFFIX}", 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}{SUFFIX}"
    return name


def _write_directory(copies: Sequence[Copied], directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for copied in copies:
        with _new_file(directory / copied.name) as file:
            file.write(copied.content)


def _write_archive(copies: Sequence[Copied], path: Path, now: float) -> None:
    with _new_file(path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for copied in copies:
            entry = tarfile.TarInfo(copied.name)
            entry.size, entry.mtime, entry.mode = len(copied.content), int(now), 0o600
            archive.addfile(entry, io.BytesIO(copied.content))


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """
    A new file that only its owner can read: on the disk when all is well, and else not there.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise
