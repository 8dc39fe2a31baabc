"""
Opening the flight files of a directory, whatever lies in it.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter.flight import layout
from rankscope_exporter.serve.files import FlightFiles

Make = Callable[..., Any]


@pytest.fixture
def files(flight_dir: Path) -> FlightFiles:
    """The files of the flight directory."""
    return FlightFiles(flight_dir)


def test_no_directory(tmp_path: Path) -> None:
    """A directory that is not there (yet) has no files, and that is no problem to tell of."""
    scan = FlightFiles(tmp_path / "missing").scan()

    assert (scan.files, scan.unreadable) == ((), ())


def test_not_a_directory(tmp_path: Path) -> None:
    """What cannot be listed is told of."""
    path = tmp_path / "file"
    path.touch()

    assert "cannot list" in FlightFiles(path).scan().unreadable[0].reason


def test_kept_open(files: FlightFiles, rank_file: Make) -> None:
    """A file is opened once, however often it is asked for."""
    rank_file(0)

    assert files.scan().files[0].flight is files.scan().files[0].flight


def test_gone(files: FlightFiles, rank_file: Make) -> None:
    """A file that was removed is no longer there, and no longer open."""
    path = rank_file(0).path
    files.scan()
    path.unlink()

    assert files.scan().files == ()


def test_replaced(files: FlightFiles, rank_file: Make, flight_dir: Path) -> None:
    """A file that was made anew under its old name is opened anew."""
    rank_file(0, model="first")
    files.scan()
    (flight_dir / "e1-dp0-pp0-tp0.flight").unlink()
    rank_file(0, model="second")

    assert [file.identity.model for file in files.scan().files] == ["second"]


def test_what_is_no_flight_file(files: FlightFiles, rank_file: Make, flight_dir: Path) -> None:
    """Anything that is not a flight file is told of with its reason, and the others are read; nothing is waited for."""
    good = rank_file(0)
    (flight_dir / "empty.flight").touch()
    (flight_dir / "noise.flight").write_bytes(os.urandom(layout.file_bytes(64)))
    (flight_dir / "link.flight").symlink_to(good.path)
    (flight_dir / "short.flight").write_bytes(good.path.read_bytes()[:-1000])
    os.mkfifo(flight_dir / "pipe.flight")
    (flight_dir / "directory.flight").mkdir()
    (flight_dir / "ignored.txt").touch()

    scan = files.scan()

    assert [file.flight.key for file in scan.files] == [good.key]
    assert {Path(u.path).stem: u.reason.partition(": ")[2] for u in scan.unreadable} == {
        "empty": "0 bytes are too few for a flight file",
        "noise": "not a flight file",
        "link": "not a regular file",
        "pipe": "not a regular file",
        "directory": "not a regular file",
        "short": f"{layout.file_bytes(64) - 1000} bytes where {layout.file_bytes(64)} belong: cut short",
    }


def test_damaged_identity(files: FlightFiles, rank_file: Make) -> None:
    """An identity that lacks fields is told of, with the field."""
    file = rank_file(0)
    file.writer._write_blob(layout.IDENTITY_OFFSET, layout.IDENTITY_BYTES, {"engine": "e1"}, 2)

    assert "dp_rank" in files.scan().unreadable[0].reason


def test_cut_short_while_open(files: FlightFiles, rank_file: Make) -> None:
    """A file that shrinks while it is open is let go of, and told of."""
    file = rank_file(0)
    assert len(files.scan().files) == 1
    os.truncate(file.path, 8192)

    scan = files.scan()

    assert scan.files == ()
    assert "cut short" in scan.unreadable[0].reason


def test_of_another_version(files: FlightFiles, rank_file: Make, flight_dir: Path) -> None:
    """A file of another version says which side to upgrade."""
    file = rank_file(0)
    raw = bytearray(file.path.read_bytes())
    raw[8] = 99
    copy = flight_dir / "newer.flight"
    copy.write_bytes(raw)

    assert "upgrade" in files.scan().unreadable[0].reason
    shutil.rmtree(flight_dir)
    assert files.scan().unreadable == ()
