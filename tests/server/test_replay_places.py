"""Where saved flight files lie, and what is said where there are none."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import anyio
import pytest
from made_ranks import made_engine, made_rank, made_records, made_report
from saved_flights import write_flight

from rankscope_server.domain.clock import Moment
from rankscope_server.domain.incident import IncidentLife
from rankscope_server.incidents.capture import CaptureSubject, make_capture
from rankscope_server.replay import places
from rankscope_server.replay.places import find_saved

NOW = Moment(1_780_000_000.0, 1000.0)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """An empty directory for what is unpacked."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    return directory


def tar_of(path: Path, *members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    """An archive with these members."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size, entry.type = len(content) if kind == tarfile.REGTYPE else 0, kind
            entry.linkname = "/etc/passwd"
            archive.addfile(entry, io.BytesIO(content))
    return path


def captured(path: Path, **manifest: Any) -> Path:
    """A capture of two ranks, with what `manifest` changes in its description."""
    ranks = [made_rank(made_records(1, 9), made_report(pp), now=NOW) for pp in (0, 1)]
    subject = CaptureSubject(made_engine(*ranks, now=NOW), "i-1", IncidentLife.OPEN, "A sentence.", ())
    data = anyio.run(make_capture, subject, NOW).data
    if manifest:
        with zipfile.ZipFile(io.BytesIO(data)) as whole, zipfile.ZipFile(path, "w") as changed:
            for name in whole.namelist():
                raw = whole.read(name)
                changed.writestr(name, json.dumps(json.loads(raw) | manifest) if name == "capture.json" else raw)
    else:
        path.write_bytes(data)
    return path


def test_files_directories_and_what_lies_below(tmp_path: Path, scratch: Path):
    """A file that is named, and every flight file in a directory and below it; none comes twice, links are left out."""
    one = write_flight(tmp_path / "a", made_records(1, 2), name="one.flight")
    two = write_flight(tmp_path / "a" / "deep", made_records(1, 2), name="two.flight")
    (tmp_path / "a" / "link.flight").symlink_to(one)
    (tmp_path / "a" / "notes.txt").write_text("not a flight file")

    found = find_saved([one, tmp_path / "a"], scratch)

    assert [file.path for file in found.files] == [one, two]
    assert found.problems == ()


def test_an_archive_of_copies(tmp_path: Path, scratch: Path):
    """Members are found under their last names, and called by where they lie in the archive."""
    content = write_flight(tmp_path, made_records(1, 2), name="x.flight").read_bytes()
    archive = tar_of(tmp_path / "kept.tar.gz", ("pp0.flight", content), ("deep/pp1.flight", content), ("notes", b"x"))

    found = find_saved([archive], scratch)

    assert [file.shown for file in found.files] == [f"{archive}/pp0.flight", f"{archive}/deep/pp1.flight"]
    assert [file.path.read_bytes() == content for file in found.files] == [True, True]


def test_an_archive_decides_nothing(tmp_path: Path, scratch: Path):
    """Members that point out of the archive land in the scratch directory, and links are not followed."""
    content = write_flight(tmp_path, made_records(1, 2), name="x.flight").read_bytes()
    evil = tar_of(tmp_path / "evil.tar.gz", ("../../evil.flight", content), ("/abs.flight", content))
    links = tar_of(tmp_path / "links.tar.gz", ("pp0.flight", b""), kind=tarfile.SYMTYPE)

    found = find_saved([evil, links], scratch)

    assert all(scratch in file.path.parents for file in found.files)
    assert [file.name for file in found.files] == ["evil.flight", "abs.flight"]
    assert found.problems == (f"{links}: no flight files (*.flight) in this archive",)
    assert not (tmp_path / "evil.flight").exists()


def test_an_archive_that_unpacks_to_too_much(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch):
    """A member that is larger than a flight file can be is refused before it fills the disk."""
    monkeypatch.setattr(places, "MAX_MEMBER_BYTES", 1000)
    archive = tar_of(tmp_path / "bomb.tar.gz", ("pp0.flight", bytes(100_000)))

    found = find_saved([archive], scratch)

    assert found.files == ()
    assert found.problems == (f"{archive}/pp0.flight: unpacks to more than a flight file can be",)


def test_a_capture_with_its_own_words(tmp_path: Path, scratch: Path):
    """A capture of an incident gives its flight files and what it says of them; unpacked by hand it gives the same."""
    path = captured(tmp_path / "incident.zip")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "unpacked")

    zipped = find_saved([path], scratch)
    unpacked = find_saved([tmp_path / "unpacked"], scratch)

    assert [file.shown for file in zipped.files] == [f"{path}/e1-dp0-pp0-tp0.flight", f"{path}/e1-dp0-pp1-tp0.flight"]
    assert {file.capture.captured_unix for file in (*zipped.files, *unpacked.files) if file.capture} == {NOW.unix}
    assert (zipped.problems, unpacked.problems, len(unpacked.files)) == ((), (), 2)


def test_a_folder_whose_description_is_damaged(tmp_path: Path, scratch: Path):
    """The files are still read; that nothing is known of the copy is said once."""
    for pp in (0, 1):
        write_flight(tmp_path / "d", made_records(1, 2), made_report(pp))
    (tmp_path / "d" / "capture.json").write_text('{"format": 1}')

    found = find_saved([tmp_path / "d"], scratch)

    assert [file.capture for file in found.files] == [None, None]
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{tmp_path / 'd' / 'capture.json'}: capture.json is damaged")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing", None, "no such file or directory"),
        ("empty", "directory", "no flight files (*.flight) in this directory, nor below it"),
        ("torn.tar.gz", b"\x1f\x8b not gzip", "cannot be unpacked: "),
        ("text.tgz", b"text", "cannot be unpacked: "),
        ("text.zip", b"text", "not a capture: "),
    ],
)
def test_what_cannot_be_used_is_told(tmp_path: Path, scratch: Path, name: str, content: Any, said: str):
    """Each place that gives nothing says why, by its name."""
    path = tmp_path / name
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)

    found = find_saved([path], scratch)

    assert found.files == ()
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{path}: {said}")


def test_a_capture_of_another_format(tmp_path: Path, scratch: Path):
    """A capture of a later release says what to do."""
    path = captured(tmp_path / "later.zip", format=2)

    (problem,) = find_saved([path], scratch).problems

    assert problem == f"{path}: capture.json is of format 2, and this server reads format 1: upgrade it"
