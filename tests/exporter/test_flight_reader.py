"""
Flight files as a library: what lies in a directory, what a file may hold, and what its owner may do to it meanwhile.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter import flight as library
from rankscope_exporter.contract import Phase
from rankscope_exporter.flight import (
    FlightError,
    FlightFile,
    FlightVersionError,
    layout,
    list_flight_files,
    open_flight,
    whole_copy,
)
from rankscope_exporter.flight.reader import BLOCK

Make = Callable[..., Any]


def test_the_public_names_are_there() -> None:
    """Everything that `__all__` names exists, sorted, with a docstring."""
    names = [name for name in library.__all__ if name[0].isupper()]

    assert names == sorted(names)
    assert all(getattr(library, name).__doc__ for name in library.__all__)


def test_opened_by_text_or_path(rank_file: Make) -> None:
    """A path may be text, and `with` closes the file."""
    rank = rank_file(0)
    rank.steps(3)

    with open_flight(str(rank.path)) as flight:
        assert list(flight.records(after=1)["step"]) == [2, 3]
    with pytest.raises(FlightError, match="Bad file descriptor"):
        flight.step()
    flight.close()


def test_no_descriptor_is_left(rank_file: Make, flight_dir: Path) -> None:
    """Files that were closed, forgotten or refused leave no descriptor behind."""
    rank = rank_file(0)
    (flight_dir / "noise.flight").write_bytes(os.urandom(layout.file_bytes(64)))
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        open_flight(rank.path).close()
        open_flight(rank.path)
        with pytest.raises(FlightError):
            open_flight(flight_dir / "noise.flight")

    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_is_no_regular_file_is_refused_at_once(flight_dir: Path, rank_file: Make) -> None:
    """Pipes, devices, sockets, directories and links are refused without waiting for anything, and are not listed."""
    good = rank_file(0).path
    os.mkfifo(flight_dir / "pipe.flight")
    (flight_dir / "directory.flight").mkdir()
    (flight_dir / "link.flight").symlink_to(good)
    (flight_dir / "dangling.flight").symlink_to("nowhere")
    special = [path for path in flight_dir.iterdir() if path != good]
    for path in [*special, Path("/dev/null"), Path("/dev/zero")]:
        for writable in (False, True):
            with pytest.raises(FlightError, match=f"{path.name}: not a regular file"):
                FlightFile(path, writable=writable)

    assert list(list_flight_files(flight_dir)) == [good]
    assert list(list_flight_files(flight_dir / "missing")) == []
    assert list(list_flight_files(good)) == []


def test_a_pipe_that_takes_the_place_of_a_file(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, rank_file: Make
) -> None:
    """What is opened is looked at again: a pipe put there since the first look is refused, and not waited for."""
    regular = os.lstat(rank_file(0).path)
    pipe = flight_dir / "pipe.flight"
    os.mkfifo(pipe)
    monkeypatch.setattr("rankscope_exporter.flight.source.os.lstat", lambda path: regular)

    with pytest.raises(FlightError, match="not a regular file"):
        FlightFile(pipe)


def test_missing_and_forbidden(tmp_path: Path) -> None:
    """What cannot be opened says why."""
    with pytest.raises(FlightError, match=r"gone\.flight: No such file or directory"):
        open_flight(tmp_path / "gone.flight")


def test_cut_short_while_it_is_open(rank_file: Make) -> None:
    """A file that shrinks while it is open is an error at the next answer, in this process as in any other: no bus error."""
    rank = rank_file(0)
    rank.steps(10)
    code = f"""
import os, sys
from rankscope_exporter.flight import FlightError, FlightFile
with FlightFile(__import__("pathlib").Path({str(rank.path)!r}), writable=True) as flight:
    os.truncate(flight.path, {layout.RING_OFFSET})
    for read in (flight.records, flight.step, flight.requests):
        try:
            read()
        except FlightError as error:
            print(error)
    os.truncate(flight.path, 100)
    for read in (flight.step, flight.requests, flight.report, flight.control, flight.histograms, flight.own_time,
                 flight.device_lengths, lambda: flight.request_control(1)):
        try:
            read()
        except FlightError as error:
            print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)

    assert done.stdout.splitlines() == [f"{rank.path.name}: cut short while it was read"] * 9


def test_a_huge_sparse_file(tmp_path: Path) -> None:
    """A header that claims a ring of terabytes, in a sparse file that has them, is refused before anything is allocated."""
    path = tmp_path / "huge.flight"
    ring = 2**32 - 1
    sizes = (layout.STEP_DTYPE.itemsize, ring, layout.REQUEST_DTYPE.itemsize, layout.TABLE_CAPACITY, layout.BUCKETS)
    with path.open("wb") as file:
        file.write(
            layout.HEADER.pack(layout.MAGIC, layout.VERSION, *sizes, os.getpid(), 0, 0, 0, 0, layout.file_bytes(ring))
        )
        try:
            file.truncate(layout.file_bytes(ring))
        except OSError:
            pytest.skip("this file system has no sparse files of that size; put the temporary directory on another")

    with pytest.raises(FlightError, match="sizes in the header do not fit"):
        open_flight(path)


def test_a_ring_of_many_blocks(rank_file: Make) -> None:
    """A ring that is looked at in several blocks, and wraps around in one, gives every step once and in order."""
    capacity = 2 * BLOCK + 100
    rank = rank_file(0, capacity=capacity)
    for step in range(1, capacity + 51):
        layout.WORD.pack_into(
            rank.writer.memory, layout.RING_OFFSET + step % capacity * layout.STEP_DTYPE.itemsize, step
        )
        rank.writer.memory[layout.RING_OFFSET + step % capacity * layout.STEP_DTYPE.itemsize + layout.PHASE_OFFSET] = (
            Phase.DONE
        )
    rank.writer.live[layout.LIVE_STEP] = capacity + 50

    with open_flight(rank.path) as flight:
        assert flight.records()["step"].tolist() == list(range(51, capacity + 51))
        assert flight.records(after=capacity)["step"].tolist() == list(range(capacity + 1, capacity + 51))


BAD_JSON = {
    "deep": b"[" * 8000,
    "deep objects": b'{"a":' * 1500,
    "not UTF-8": b'{"engine": "\xff\xfe"}',
    "UTF-16": '{"engine": "e"}'.encode("utf-16"),
    "cut": b'{"engine": "e',
    "no object": b"[1, 2]",
    "nothing": b"",
    "NaN": b'{"a": NaN}',
    "infinite": b'{"a": 1e999}',
    "minus infinity": b'{"a": -Infinity}',
    "long number": b'{"a": ' + b"9" * 8000 + b"}",
}


@pytest.mark.parametrize("raw", BAD_JSON.values(), ids=BAD_JSON)
def test_json_that_is_none(rank_file: Make, raw: bytes) -> None:
    """A JSON area that is deep, of another encoding, cut, or not JSON is an error that names the file; the steps stay readable."""
    rank = rank_file(0)
    rank.steps(2)
    start = layout.HOOKS_OFFSET + layout.BLOB_HEAD.size
    rank.writer.memory[start : start + len(raw)] = raw
    layout.BLOB_HEAD.pack_into(rank.writer.memory, layout.HOOKS_OFFSET, 100, len(raw))

    with open_flight(rank.path) as flight:
        with pytest.raises(FlightError, match=f"{rank.path.name}: unreadable JSON area"):
            flight.report()
        assert len(flight.records()) == 2
        assert whole_copy(flight)[layout.HOOKS_OFFSET :][: layout.BLOB_HEAD.size + len(raw)] == bytes(
            rank.writer.memory[layout.HOOKS_OFFSET :][: layout.BLOB_HEAD.size + len(raw)]
        )


def test_json_longer_than_its_area(rank_file: Make) -> None:
    """A JSON area that claims to be longer than it is is an error, and is kept as it is in a copy."""
    rank = rank_file(0)
    layout.BLOB_HEAD.pack_into(rank.writer.memory, layout.IDENTITY_OFFSET, 2, 1 << 31)

    with open_flight(rank.path) as flight:
        with pytest.raises(FlightError, match="2147483648 bytes in 3840"):
            flight.identity()
        assert layout.BLOB_HEAD.unpack_from(whole_copy(flight), layout.IDENTITY_OFFSET) == (2, 1 << 31)


def test_half_written_for_good(rank_file: Make, tmp_path: Path) -> None:
    """Areas that a dead rank left half written are unknown: never empty, and marked as what they are in a copy too."""
    rank = rank_file(0)
    rank.steps(1)
    layout.BLOB_HEAD.pack_into(rank.writer.memory, layout.HOOKS_OFFSET, 7, 10)
    layout.TABLE_HEAD.pack_into(rank.writer.memory, layout.TABLE_OFFSET, 9, 0, 3)
    copy = tmp_path / "copy.flight"

    with open_flight(rank.path) as flight:
        copy.write_bytes(whole_copy(flight))
    for path in (rank.path, copy):
        with open_flight(path) as flight:
            with pytest.raises(FlightError, match="half written"):
                flight.report()
            with pytest.raises(FlightError, match="half written"):
                flight.requests()
            assert len(flight.records()) == 1


def test_the_last_good_answer_stands_in(rank_file: Make) -> None:
    """A reader that read an area before gives that again while it is being written."""
    rank = rank_file(0)
    rank.writer.write_requests([(1, 1, 5, 3, 2, layout.MARGIN_UNKNOWN, 1, 2, b"r1")], 1)
    with open_flight(rank.path) as flight:
        report, requests = flight.report(), flight.requests()
        layout.WORD.pack_into(rank.writer.memory, layout.HOOKS_OFFSET, 9)
        layout.WORD.pack_into(rank.writer.memory, layout.TABLE_OFFSET, 9)

        assert flight.report() == report
        assert flight.requests() == requests
        assert requests[1][0].margin is None


def test_ids_that_cannot_be_so_long(rank_file: Make) -> None:
    """A row whose id claims to be longer than there is room for is left out; one that is not UTF-8 is shown as far as it is."""
    rank = rank_file(0)
    row = (1, 1, 5, 3, 2, 0, 1)
    rank.writer.write_requests(
        [(*row, 255, b"x" * 80), (*row, 3, b"a\xffb"), (*row, 0, b"unused"), (*row, 80, b"y" * 80)], 4
    )

    with open_flight(rank.path) as flight:
        assert [r.request_id for r in flight.requests()[1]] == ["a\ufffdb", "", "y" * 80]


def test_more_rows_than_the_table_holds(rank_file: Make) -> None:
    """A table that claims more rows than it has room for is damaged."""
    rank = rank_file(0)
    layout.TABLE_HEAD.pack_into(rank.writer.memory, layout.TABLE_OFFSET, 2, 33, 1)

    with open_flight(rank.path) as flight, pytest.raises(FlightError, match="damaged"):
        flight.requests()


def test_words_of_a_later_release(rank_file: Make) -> None:
    """Numbers that this reader has no word for are taken as the most careful one."""
    rank = rank_file(0)
    rank.writer.words[layout.ACK_OUTCOME] = rank.writer.words[layout.ACK_STATE] = 99
    rank.writer.live[layout.LIVE_DETAIL] = 2**64 - 1

    with open_flight(rank.path) as flight:
        assert flight.control().outcome.name == "NONE"
        assert flight.control().mitigation_state.name == "UNKNOWN_CODE"
        assert flight.detail().name == "CUT"


def test_wall_time(rank_file: Make) -> None:
    """Times of records become wall-clock times by the clocks in the header, and None where that makes no sense."""
    rank = rank_file(0)
    with open_flight(rank.path) as flight:
        created = flight.created_monotonic_ns

        assert flight.wall_time(created + 1_500_000_000) == pytest.approx(flight.created_unix + 1.5, abs=1e-3)
        assert [flight.wall_time(ns) for ns in (0, created - 1, 1 << 63, 2**64 - 1)] == [None] * 4
    head = list(layout.HEADER.unpack_from(rank.writer.memory))
    layout.HEADER.pack_into(rank.writer.memory, 0, *head[:10], -1, *head[11:])
    with open_flight(rank.path) as flight:
        assert flight.wall_time(created + 1) is None


def test_the_control_word(rank_file: Make) -> None:
    """The control word arrives whole; a file that is open for reading only refuses it."""
    rank = rank_file(0)
    word = layout.encode_control(1, 77, 12345, desired=True)
    with open_flight(rank.path) as flight, pytest.raises(FlightError, match="Permission denied"):
        flight.request_control(word)
    with FlightFile(rank.path, writable=True) as flight:
        flight.request_control(word)

        assert flight.control().requested_word == rank.writer.words[layout.CONTROL_REQUEST] == word


@pytest.mark.parametrize(("version", "remedy"), [(1, "restart its vLLM"), (3, "upgrade rankscope-exporter here")])
def test_other_versions(rank_file: Make, version: int, remedy: str) -> None:
    """A file of another version says whether it is older or newer, and what to do."""
    rank = rank_file(0)
    rank.writer.memory[8] = version

    with pytest.raises(FlightVersionError, match=remedy) as raised:
        open_flight(rank.path)
    assert raised.value.version == version
