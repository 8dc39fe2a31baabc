"""
Where saved flight files lie: by name, in directories, in archives of `rankscope-exporter copy`, in captures of incidents.

What lies in an archive is unpacked into a directory of the caller's, under names of our own: nothing in an archive
decides where something is written, or how much.
"""

import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from rankscope_exporter.flight.layout import SUFFIX, file_bytes
from rankscope_exporter.flight.reader import MAX_RING_CAPACITY
from rankscope_server.incidents.manifest import MANIFEST_NAME, CaptureError, CaptureManifest, parse_manifest
from rankscope_server.incidents.reading import CaptureFile
from rankscope_server.replay.errors import ReplayError

TAR_SUFFIXES = (".tar.gz", ".tgz", ".tar")
ZIP_SUFFIX = ".zip"

MAX_MEMBERS = 16_384
"""
Flight files that are taken out of one archive.
"""
MAX_MEMBER_BYTES = file_bytes(MAX_RING_CAPACITY)
MAX_ARCHIVE_BYTES = 16 << 30
"""
What one archive may unpack to, in all.
"""

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class SavedFile:
    """
    A flight file to read: where it lies now, and what whoever named it calls it.
    """

    path: Path
    shown: str
    capture: CaptureManifest | None = None
    """What the capture says that it is part of; None where it is part of none."""

    @property
    def name(self) -> str:
        """Its own name, as it was saved."""
        return PurePosixPath(self.shown).name


@dataclass(frozen=True, slots=True)
class Places:
    """
    The flight files that were found, and what is wrong with the rest.
    """

    files: tuple[SavedFile, ...]
    problems: tuple[str, ...]


def find_saved(places: Iterable[Path], scratch: Path) -> Places:
    """
    The flight files at `places`; archives are unpacked into `scratch`, an empty directory that outlives the answer's use.
    """
    finder = _Finder()
    files: dict[Path, SavedFile] = {}
    for number, place in enumerate(places):
        try:
            for file in finder.find(place, scratch / str(number)):
                files.setdefault(file.path.resolve(), file)
        except ReplayError as error:  # noqa: PERF203  # one bad place must not hide the others
            finder.problems.append(str(error))
    return Places(tuple(files.values()), tuple(finder.problems))


class _Finder:
    """
    Collects what is wrong on the way.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._captures: dict[Path, CaptureManifest | None] = {}

    def find(self, place: Path, scratch: Path) -> Iterator[SavedFile]:
        """
        The flight files at one place.

        Raises:
            ReplayError: there are none.

        """
        if place.is_dir():
            yield from self._in_directory(place)
        elif not place.exists():
            msg = f"{place}: no such file or directory"
            raise ReplayError(msg)
        elif place.name.endswith(ZIP_SUFFIX):
            yield from _unpack_capture(place, scratch)
        elif place.name.endswith(TAR_SUFFIXES):
            yield from _unpack_tar(place, scratch)
        else:
            yield SavedFile(place, str(place), self._capture_in(place.parent))

    def _in_directory(self, place: Path) -> Iterator[SavedFile]:
        found = False
        for directory, folders, names in os.walk(place):
            folders.sort()
            for name in sorted(names):
                path = Path(directory) / name
                if name.endswith(SUFFIX) and not path.is_symlink():
                    found = True
                    yield SavedFile(path, str(path), self._capture_in(path.parent))
        if not found:
            msg = f"{place}: no flight files (*{SUFFIX}) in this directory, nor below it"
            raise ReplayError(msg)

    def _capture_in(self, directory: Path) -> CaptureManifest | None:
        """
        What the capture that was unpacked into `directory` says; one that cannot be read is told of once, and is then none.
        """
        path = directory / MANIFEST_NAME
        if directory not in self._captures:
            self._captures[directory] = None
            try:
                if path.is_file():
                    self._captures[directory] = parse_manifest(path.read_bytes())
            except CaptureError as error:
                self.problems.append(f"{path}: {error}")
            except OSError as error:
                self.problems.append(f"{path}: {error.strerror}")
        return self._captures[directory]


def _unpack_capture(place: Path, scratch: Path) -> Iterator[SavedFile]:
    scratch.mkdir(mode=0o700)
    try:
        capture = CaptureFile(place.read_bytes())
        ranks = [rank for rank in capture.manifest.ranks if rank.file]
        for rank in ranks:
            (scratch / rank.file).write_bytes(capture.flight(rank))
            yield SavedFile(scratch / rank.file, f"{place}/{rank.file}", capture.manifest)
    except CaptureError as error:
        raise ReplayError(f"{place}: {error}") from error
    except OSError as error:
        raise ReplayError(f"{place}: {error.strerror}") from error
    if not ranks:
        msg = f"{place}: no flight files in this capture"
        raise ReplayError(msg)


def _unpack_tar(place: Path, scratch: Path) -> Iterator[SavedFile]:
    """
    The flight files of an archive, each under its last name in a folder of its own number.
    """
    scratch.mkdir(mode=0o700)
    room, found = MAX_ARCHIVE_BYTES, 0
    try:
        with tarfile.open(place) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                content = archive.extractfile(member) if member.isreg() and name.endswith(SUFFIX) else None
                if content is None:
                    continue
                folder = scratch / str(found)
                folder.mkdir(mode=0o700)
                found += 1
                if found > MAX_MEMBERS:
                    msg = f"{place}: more than {MAX_MEMBERS} flight files in one archive: unpack it, and name the directory"
                    raise ReplayError(msg)
                with content:
                    room -= _write(content, folder / name, min(room, MAX_MEMBER_BYTES), f"{place}/{member.name}")
                yield SavedFile(folder / name, f"{place}/{member.name}")
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        msg = f"{place}: cannot be unpacked{' to its end' if found else ''}: {reason}"
        raise ReplayError(msg) from error
    if not found:
        msg = f"{place}: no flight files (*{SUFFIX}) in this archive"
        raise ReplayError(msg)


def _write(content: IO[bytes], path: Path, limit: int, shown: str) -> int:
    """
    How many bytes were written.

    Raises:
        ReplayError: there are more than `limit`.

    """
    written = 0
    with path.open("wb") as file:
        while block := content.read(_BLOCK):
            written += len(block)
            if written > limit:
                msg = f"{shown}: unpacks to more than a flight file can be"
                raise ReplayError(msg)
            file.write(block)
    return written
