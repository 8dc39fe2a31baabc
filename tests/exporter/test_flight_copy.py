"""
`rankscope-exporter copy`: flight files kept for an incident.
"""

import contextlib
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter.cli import main
from rankscope_exporter.commands import archive
from rankscope_exporter.flight import FlightError, FlightFile, layout, list_flight_files, whole_copy

Make = Callable[..., Any]
Capture = pytest.CaptureFixture[str]
NOW = 1_780_000_000.0


def copy(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and complaints of a copy."""
    code = main(["copy", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_into_a_new_directory(rank_file: Make, flight_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    """Every rank of a directory is copied under its name and the time, for its owner only; the copies open, and say the same."""
    ranks = [rank_file(pp) for pp in (0, 1)]
    for rank in ranks:
        rank.steps(5)
    destination = tmp_path / "incidents" / "one"

    code, out, err = copy(capsys, flight_dir, destination)

    assert (code, err) == (0, "")
    assert destination.stat().st_mode & 0o777 == 0o700
    copies = list(list_flight_files(destination))
    assert [
        bool(re.fullmatch(rf"e1-dp0-pp{pp}-tp0\.\d{{8}}T\d{{6}}Z\.flight", path.name)) for pp, path in enumerate(copies)
    ] == [True] * 2
    assert out.splitlines() == [f"{r.path} -> {c}, last step 5" for r, c in zip(ranks, copies, strict=True)]
    for rank, path in zip(ranks, copies, strict=True):
        assert path.stat().st_mode & 0o777 == 0o600
        with FlightFile(path) as kept, FlightFile(rank.path) as live:
            assert kept.records().tobytes() == live.records().tobytes()
            assert kept.identity() == live.identity()


def test_into_an_archive(rank_file: Make, tmp_path: Path, capsys: Capture) -> None:
    """A name that ends in .tar.gz becomes an archive, which is never overwritten."""
    rank = rank_file(0)
    rank.steps(5)
    destination = tmp_path / "incident.tar.gz"

    assert copy(capsys, rank.path, destination)[0] == 0
    before = destination.read_bytes()
    code, _, err = copy(capsys, rank.path, destination)

    assert code == 2
    assert "nothing is overwritten" in err
    assert destination.read_bytes() == before
    assert destination.stat().st_mode & 0o777 == 0o600
    with tarfile.open(destination) as tar:
        (entry,) = tar.getmembers()
        assert (entry.mode, entry.size) == (0o600, layout.file_bytes(64))
        tar.extract(entry, tmp_path, filter="data")
    with FlightFile(tmp_path / entry.name) as flight:
        assert len(flight.records()) == 5


def test_nothing_is_overwritten(rank_file: Make, tmp_path: Path) -> None:
    """A second copy in the same second is refused, and leaves the first as it is."""
    rank = rank_file(0)
    rank.steps(1)
    complaints: list[str] = []
    out = (tmp_path / "out").open("w")
    destination = tmp_path / "kept"
    with out:
        assert archive.copy([rank.path], destination, NOW, out, complaints.append) == 0
        (kept,) = destination.iterdir()
        before = kept.read_bytes()
        rank.steps(9)
        assert archive.copy([rank.path], destination, NOW, out, complaints.append) == 1

    assert "File exists" in complaints[0]
    assert kept.read_bytes() == before


def test_two_files_of_one_name(rank_file: Make, tmp_path: Path) -> None:
    """Files of several directories that have one name are told apart by a number."""
    names: set[str] = set()
    for place in ("a", "b", "c"):
        names.add(archive.copy_name(tmp_path / place / "rank.flight", NOW, names))

    stem = "rank.20260528T202640Z"
    assert names == {f"{stem}.flight", f"{stem}-2.flight", f"{stem}-3.flight"}


def test_where_nothing_is_copied_to(rank_file: Make, flight_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    """Copies into the flight directory would be served as ranks, and a file is no directory: both are refused."""
    rank = rank_file(0)
    (tmp_path / "file").touch()
    (tmp_path / "same").symlink_to(flight_dir)

    for destination, said in (
        (flight_dir, "would serve the copies"),
        (tmp_path / "same", "would serve"),
        (tmp_path / "file", "is a file"),
    ):
        code, _, err = copy(capsys, rank.path, destination)
        assert code == 2
        assert said in err
    assert list(flight_dir.iterdir()) == [rank.path]


def test_what_cannot_be_copied(rank_file: Make, flight_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    """What cannot be read is told of and the rest is copied; the exit code is 1."""
    rank = rank_file(0)
    old = bytearray(rank.path.read_bytes())
    old[8] = 1
    (flight_dir / "old.flight").write_bytes(old)
    destination = tmp_path / "kept"

    code, out, err = copy(capsys, flight_dir, tmp_path / "missing", destination)

    assert code == 1
    assert len(out.splitlines()) == len(list(destination.iterdir())) == 1
    assert "old.flight: flight file version 1 is older" in err
    assert "missing: no such file" in err


def test_a_full_disk_leaves_nothing_behind(
    rank_file: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A copy that could not be written to its end is removed, and told of."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rankscope_exporter.commands.archive.os.fsync", full)
    rank = rank_file(0)
    for destination in (tmp_path / "kept", tmp_path / "kept.tar.gz"):
        code, out, err = copy(capsys, rank.path, destination)
        assert (code, out) == (1, "")
        assert "No space left on device" in err
    assert list((tmp_path / "kept").iterdir()) == []
    assert not (tmp_path / "kept.tar.gz").exists()


WRITER = """
import sys
from pathlib import Path
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter

writer = FlightWriter(Path(sys.argv[1]), "busy", {"engine": "e"}, capacity=64)
memory, step = writer.memory, 0
print("ready", flush=True)
while True:
    step += 1
    offset = layout.RING_OFFSET + step % 64 * layout.STEP_DTYPE.itemsize
    memory[offset + layout.PHASE_OFFSET] = 0
    layout.RECORD_BEGUN.pack_into(memory, offset, step, step * 7, step, 0, 1, 0, 4, 0, 0)
    memory[offset + layout.PHASE_OFFSET] = 1
    writer.live[layout.LIVE_STEP] = step
    layout.PART_STATE.pack_into(memory, offset + layout.PART_STATE_OFFSET, step * 3, step, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0)
    memory[offset + layout.PHASE_OFFSET] = 2
    layout.PART_DECIDED.pack_into(memory, offset + layout.PART_DECIDED_OFFSET, step, step * 5, step, 0, step, 1, 0, 1, 1, 1, 1, 1)
    memory[offset + layout.PHASE_OFFSET] = 3
    layout.PART_DONE.pack_into(memory, offset + layout.PART_DONE_OFFSET, step, step, step * 11, 0)
    memory[offset + layout.PHASE_OFFSET] = 4
    if step % 7 == 0:
        row = (step, step, step & 0xFFFF, 0, step & 0xFFFF, 0, 0, 80, str(step).encode().ljust(80, b"."))
        writer.write_requests([row] * (step % 32), step)
        writer.write_report({"n": step, "text": str(step) * (step % 50)})
"""


@pytest.mark.integration
def test_copies_of_a_rank_that_never_rests(tmp_path: Path) -> None:
    """Copies of a file that another process writes as fast as it can hold whole records, tables and reports only."""
    copy_path = tmp_path / "copy.flight"
    seen: set[int] = set()
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            with FlightFile(tmp_path / "busy.flight") as flight:
                for _ in range(200):
                    copy_path.write_bytes(whole_copy(flight))
                    with FlightFile(copy_path) as kept:
                        seen |= check_busy(kept)
        finally:
            process.kill()
    assert len(seen) > 200, "the ring was read while it turned"


def check_busy(kept: FlightFile) -> set[int]:
    """Every value follows from its step, as `WRITER` has it; the steps that are there."""
    for record in kept.records():
        step, phase = int(record["step"]), int(record["phase"])
        assert record["batch_hash"] == step * 7
        assert record["state_sum"] == (step * 3 if phase >= 2 else 0)
        assert record["mask_hash"] == (step * 5 if phase >= 3 else 0)
        assert record["own_ns_total"] == (step * 11 if phase == 4 else 0)
    with contextlib.suppress(FlightError):  # half written at each of the looks
        drifting, rows = kept.requests()
        assert {row.request_id for row in rows} <= {str(drifting).ljust(80, ".")}
        assert len(rows) == drifting % 32
    with contextlib.suppress(FlightError):
        report = kept.report()
        assert "n" not in report or report["text"] == str(report["n"]) * (report["n"] % 50)
    return set(map(int, kept.records()["step"]))
