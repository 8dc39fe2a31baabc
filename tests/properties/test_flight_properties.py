"""
The flight file under every interleaving and damage that hypothesis can think of.
"""

import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope_exporter.contract import Phase
from rankscope_exporter.flight import FlightError, FlightFile, FlightVersionError, layout, whole_copy
from rankscope_exporter.flight.reader import MAX_RING_CAPACITY
from rankscope_exporter.flight.source import FlightSource
from rankscope_exporter.flight.writer import FlightWriter

CAPACITY = 64
relaxed = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_part(writer: FlightWriter, step: int, phase: int) -> None:
    """
    The stores of a recorder that reaches `phase` of `step`, with values that follow from the step.
    """
    memory = writer.memory
    offset = layout.RING_OFFSET + step % writer.capacity * layout.STEP_DTYPE.itemsize
    if phase == Phase.SCHEDULED:
        memory[offset : offset + layout.STEP_DTYPE.itemsize] = bytes(layout.STEP_DTYPE.itemsize)
        layout.PART_BEGUN.pack_into(memory, offset, step, step * 7, step, 0, 1, 0, 4, 0, 0)
    elif phase == Phase.STATE_UPDATED:
        layout.PART_STATE.pack_into(
            memory, offset + layout.PART_STATE_OFFSET, step * 3, step, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0
        )
    elif phase == Phase.DECIDED:
        layout.PART_DECIDED.pack_into(
            memory, offset + layout.PART_DECIDED_OFFSET, step, step * 5, step, 0, step, 1, 0, 1, 1, 1, 1, 1
        )
    else:
        layout.PART_DONE.pack_into(memory, offset + layout.PART_DONE_OFFSET, step, step, step * 11, 0)
    memory[offset + layout.PHASE_OFFSET] = phase
    if phase == Phase.SCHEDULED:
        writer.live[layout.LIVE_STEP] = step


@relaxed
@given(parts=st.integers(0, 4 * 3 * CAPACITY), after=st.integers(0, 3 * CAPACITY))
def test_records_are_those_that_were_written(tmp_path: Path, parts: int, after: int):
    """Whatever part the writer has come to, a reader sees the newest records in order, each whole up to its phase."""
    writer = FlightWriter(tmp_path, "rank", {}, capacity=CAPACITY)
    for n in range(parts):
        write_part(writer, n // 4 + 1, n % 4 + 1)
    with FlightFile(writer.path) as flight:
        records = flight.records(after)
    last = (parts + 3) // 4
    first = max(after + 1, last - CAPACITY + 1, 1)
    assert list(records["step"]) == list(range(first, last + 1))
    for record in records:
        step, phase = int(record["step"]), int(record["phase"])
        assert phase == (4 if step < last else (parts - 1) % 4 + 1)
        assert record["batch_hash"] == step * 7
        assert record["state_sum"] == (step * 3 if phase >= Phase.STATE_UPDATED else 0)
        assert record["mask_hash"] == (step * 5 if phase >= Phase.DECIDED else 0)
        assert record["own_ns_total"] == (step * 11 if phase == Phase.DONE else 0)
    writer.path.unlink()


class TornSource:
    """
    A file that the writer goes on with in the middle of each read: the first bytes of each `unit` from `origin` on are
    from before, the rest from after.
    """

    def __init__(self, source: FlightSource, write_on: Callable[[], None], cut: int) -> None:
        self.source, self.write_on, self.cut = source, write_on, cut
        self.close = source.close

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from before up to the cut, and from after behind it."""
        before = self.source.read(offset, size)
        self.write_on()
        after = self.source.read(offset, size)
        if offset < layout.RING_OFFSET:
            return before[: self.cut] + after[self.cut :]
        cut, unit = self.cut % (layout.STEP_DTYPE.itemsize + 1), layout.STEP_DTYPE.itemsize
        return b"".join(before[i : i + cut] + after[i + cut : i + unit] for i in range(0, size, unit))


def torn(
    flight: FlightFile, write: Callable[[int], None], bursts: Mapping[int, int], cut: int, *, steadily: int = 0
) -> FlightFile:
    """The same file, with the writer going on by `bursts[n]` in the middle of read `n`, and by `steadily` in the others."""
    count = itertools.count()
    flight.source = TornSource(flight.source, lambda: write(bursts.get(next(count), steadily)), cut)
    return flight


bursts_of_parts = st.dictionaries(
    st.integers(0, 12),
    st.one_of(st.integers(1, 9), st.integers(4 * CAPACITY - 8, 4 * CAPACITY + 8), st.integers(1, 9 * CAPACITY)),
    max_size=4,
)
"""
How many parts of records the writer writes in the middle of which read: a few, or a whole turn of the ring.
"""


@relaxed
@given(
    start=st.integers(1, 4 * 2 * CAPACITY),
    bursts=bursts_of_parts,
    cut=st.integers(0, layout.STEP_DTYPE.itemsize),
)
def test_no_record_is_invented_while_the_writer_goes_on(tmp_path: Path, start: int, bursts: dict[int, int], cut: int):
    """A writer that goes on between and during the reads of the reader makes records go missing, never wrong."""
    writer = FlightWriter(tmp_path, "rank", {}, capacity=CAPACITY)
    position = 0

    def write(parts: int) -> None:
        nonlocal position
        for _ in range(parts):
            write_part(writer, position // 4 + 1, position % 4 + 1)
            position += 1

    write(start)
    with FlightFile(writer.path) as flight:
        records = torn(flight, write, bursts, cut).records()
    for record in records:
        step, phase = int(record["step"]), int(record["phase"])
        assert Phase.SCHEDULED <= phase <= Phase.DONE
        assert record["batch_hash"] == step * 7
        assert record["state_sum"] == (step * 3 if phase >= Phase.STATE_UPDATED else 0)
        assert record["mask_hash"] == (step * 5 if phase >= Phase.DECIDED else 0)
    writer.path.unlink()


@relaxed
@given(
    damage=st.lists(st.tuples(st.integers(0, layout.file_bytes(CAPACITY) - 1), st.integers(0, 255)), max_size=40),
    cut=st.integers(0, 3),
)
def test_damage_is_an_error_or_a_readable_file(tmp_path: Path, damage: list[tuple[int, int]], cut: int):
    """Flipped bytes and cut files give a FlightError or answers of the right types; never a crash."""
    writer = FlightWriter(tmp_path, "rank", {"engine": "e"}, capacity=CAPACITY)
    for n in range(4 * 70):
        write_part(writer, n // 4 + 1, n % 4 + 1)
    raw = bytearray(writer.path.read_bytes())
    writer.path.unlink()
    for position, value in damage:
        raw[position] = value
    path = tmp_path / "damaged.flight"
    path.write_bytes(raw[: len(raw) * (4 - cut) // 4])
    try:
        flight = FlightFile(path)
    except FlightError:
        return
    with flight:
        read_all(flight)


@relaxed
@given(content=st.binary(max_size=64))
def test_foreign_files_are_told_by_name(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    """A file that is no flight file is an error that names it."""
    path = tmp_path_factory.mktemp("foreign") / "foreign.flight"
    path.write_bytes(content + bytes(layout.RING_OFFSET))
    with pytest.raises(FlightError, match=r"foreign\.flight"):
        FlightFile(path)


@given(
    mitigation=st.integers(1, 7),
    generation=st.integers(1, layout.MAX_GENERATION),
    step=st.integers(0, layout.MAX_EFFECTIVE_STEP),
    desired=st.booleans(),
)
def test_the_control_word_holds_what_it_was_given(mitigation: int, generation: int, step: int, desired: bool):
    """A control word decodes to its parts, fits 64 bits, and is never 0."""
    word = layout.encode_control(mitigation, generation, step, desired=desired)
    assert 0 < word < 1 << 64
    assert layout.decode_control(word) == (mitigation, generation, step, desired)


@pytest.mark.parametrize(
    ("generation", "step"), [(0, 0), (layout.MAX_GENERATION + 1, 0), (1, -1), (1, layout.MAX_EFFECTIVE_STEP + 1)]
)
def test_what_does_not_fit_into_the_control_word_is_refused(generation: int, step: int):
    """Out-of-range parts are an error, not a wrong word."""
    with pytest.raises(ValueError, match="out of range"):
        layout.encode_control(1, generation, step, desired=True)


def test_a_flight_file_is_private_and_whole(tmp_path: Path):
    """The directory is 0700, the file 0600, its blocks allocated, and no unfinished file is left."""
    directory = tmp_path / "new" / "flight"
    writer = FlightWriter(directory, "rank", {"a": 1})
    assert directory.stat().st_mode & 0o777 == 0o700
    stat = writer.path.stat()
    assert stat.st_mode & 0o777 == 0o600
    assert stat.st_blocks * 512 >= stat.st_size
    assert [p.name for p in directory.iterdir()] == ["rank.flight"]


def write_everything(writer: FlightWriter, n: int) -> None:
    """
    The `n`-th state of every area but the ring: each value follows from `n`, so that a mixture of two states shows.
    """
    writer.write_report({"n": n, "text": chr(97 + n % 26) * (n % 5 * 100)})
    row = (n, n, n, n, n, n, n % 2, n % 80 + 1, chr(97 + n % 26).encode() * (n % 80 + 1))
    writer.write_requests([row] * (n % 40), n)
    layout.WORD.pack_into(writer.device, 0, 2 * n + 1)
    layout.DEVICE.pack_into(writer.device, 0, 2 * n + 1, 1, n, n, n, n, n, n, n, n, n)
    layout.WORD.pack_into(writer.device, 0, 2 * n + 2)
    for index in range(2 * layout.BUCKETS + 2):
        writer.lengths[index] = n
    for index in range(layout.OWN_BUCKETS + 1):
        writer.own[index] = n


def check_report(flight: FlightFile) -> None:
    """The report is one of those that were written, or unreadable."""
    with contextlib.suppress(FlightError):
        report = flight.report()
        n = report.get("n", -1)
        assert n < 0 or report["text"] == chr(97 + n % 26) * (n % 5 * 100)


def check_requests(flight: FlightFile) -> None:
    """The table is one of those that were written, or unreadable."""
    with contextlib.suppress(FlightError):
        drifting, rows = flight.requests()
        assert len(rows) == min(drifting % 40, layout.TABLE_CAPACITY)
        for row in rows:
            assert (row.step, row.drift, row.state_length) == (drifting, drifting, drifting)
            assert row.request_id == chr(97 + drifting % 26) * (drifting % 80 + 1)


def check_device(flight: FlightFile) -> None:
    """The sample is one of those that were written, or none."""
    sample = flight.device_lengths()
    assert sample is None or len({int(sample[name]) for name in layout.DEVICE_DTYPE.names[2:]}) == 1


CHECKS = (check_report, check_requests, check_device)


@pytest.mark.parametrize("check", CHECKS)
@relaxed
@given(
    states=st.lists(st.integers(1000, 9999), min_size=8, max_size=16, unique=True),
    cut=st.one_of(st.integers(0, 80), st.integers(0, 700), st.integers(0, layout.TABLE_BYTES)),
    bursts=st.dictionaries(st.integers(0, 5), st.integers(1, 2), max_size=4),
)
def test_no_area_is_invented_while_the_writer_goes_on(
    tmp_path: Path, check: Callable[[FlightFile], None], states: list[int], cut: int, bursts: dict[int, int]
):
    """Report, request table and device lengths are each of one moment, or not there, however reads and writes interleave."""
    writer = FlightWriter(tmp_path, "rank", {"engine": "e"}, capacity=CAPACITY)
    queue = list(states)

    def write(count: int) -> None:
        for _ in range(count):
            if queue:
                write_everything(writer, queue.pop(0))

    write(1)
    with torn(FlightFile(writer.path), write, bursts, cut) as flight:
        check(flight)
        check(flight)
        assert flight.identity() == {"engine": "e"}
    writer.path.unlink()


@relaxed
@given(n=st.integers(0, 10_000))
def test_areas_at_rest_are_read_as_written(tmp_path: Path, n: int):
    """Without a writer in the way every area is read, and holds what was written."""
    writer = FlightWriter(tmp_path, "rank", {}, capacity=CAPACITY)
    write_everything(writer, n)
    with FlightFile(writer.path) as flight:
        assert flight.report()["n"] == n
        assert flight.requests()[0] == n
        assert int(flight.device_lengths()["step"]) == n
        lengths, own = flight.histograms(), flight.own_time()
        assert (set(lengths.state), set(lengths.scheduler), lengths.state_sum, lengths.scheduler_sum) == (
            {n},
            {n},
            n,
            n,
        )
        assert (set(own.steps), own.seconds) == ({n}, n / 1e9)
    writer.path.unlink()


@functools.cache
def whole_file() -> bytes:
    """The bytes of a flight file with something in every area."""
    with tempfile.TemporaryDirectory() as directory:
        writer = FlightWriter(Path(directory), "whole", {"engine": "e"}, capacity=CAPACITY)
        for n in range(4 * 70):
            write_part(writer, n // 4 + 1, n % 4 + 1)
        write_everything(writer, 7)
        return writer.path.read_bytes()


def read_all(flight: FlightFile) -> None:
    """
    Ask for everything: what cannot be read is a FlightError, and what is answered is of the right kind and size.
    """
    with contextlib.suppress(FlightError):
        records = flight.records()
        assert len(records) <= flight.ring_capacity
        assert list(records["step"]) == sorted(set(map(int, records["step"])))
        assert all(Phase.SCHEDULED <= phase <= Phase.DONE for phase in records["phase"])
    for read in (flight.identity, flight.report):
        with contextlib.suppress(FlightError):
            assert isinstance(read(), dict)
    with contextlib.suppress(FlightError):
        drifting, rows = flight.requests()
        assert drifting >= 0
        assert len(rows) <= layout.TABLE_CAPACITY
        assert all(len(row.request_id) <= layout.REQUEST_ID_BYTES for row in rows)
    for read in (flight.control, flight.histograms, flight.own_time, flight.device_lengths, flight.detail, flight.step):
        with contextlib.suppress(FlightError):
            read()
    with contextlib.suppress(FlightError):
        copy = whole_copy(flight)
        assert len(copy) == layout.file_bytes(flight.ring_capacity)


@relaxed
@given(cut=st.integers(0, layout.file_bytes(CAPACITY)), opened=st.booleans())
def test_a_file_cut_at_any_byte_is_an_error(tmp_path: Path, cut: int, opened: bool):
    """A file that is cut before or after it was opened gives errors where it ends, and never ends its reader."""
    path = tmp_path / "cut.flight"
    path.write_bytes(whole_file())
    if not opened:
        os.truncate(path, cut)
    try:
        flight = FlightFile(path)
    except FlightError:
        assert cut < layout.file_bytes(CAPACITY)
        return
    with flight:
        os.truncate(path, cut)
        read_all(flight)


@relaxed
@given(flips=st.lists(st.tuples(st.integers(0, layout.RING_OFFSET + 4096), st.integers(0, 7)), max_size=60))
def test_flipped_bits_are_an_error_or_a_readable_file(tmp_path: Path, flips: list[tuple[int, int]]):
    """Bits that flip in header, areas and records never make a reader fail in another way than it says."""
    raw = bytearray(whole_file())
    for position, bit in flips:
        raw[position] ^= 1 << bit
    path = tmp_path / "flipped.flight"
    path.write_bytes(raw)
    with contextlib.suppress(FlightError), FlightFile(path) as flight:
        read_all(flight)


HEADER_NAMES = ("record", "ring", "entry", "table", "buckets", "total")
HEADER_INDEX = {"record": 2, "ring": 3, "entry": 4, "table": 5, "buckets": 6, "total": 12}
big = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, CAPACITY - 1, CAPACITY + 1, 2**31, 2**32 - 1]))


@relaxed
@given(lies=st.dictionaries(st.sampled_from(HEADER_NAMES), big, min_size=1), size=st.sampled_from(["same", "fitting"]))
def test_a_header_that_lies_about_sizes_is_an_error(tmp_path: Path, lies: dict[str, int], size: str):
    """Sizes and counts of the header are checked against the layout and the file, also where the file is sparse and huge."""
    path = tmp_path / "lying.flight"
    raw = bytearray(whole_file())
    head = list(layout.HEADER.unpack_from(raw))
    before = list(head)
    for name, value in lies.items():
        head[HEADER_INDEX[name]] = value
    if size == "fitting" and "total" not in lies:
        head[12] = layout.file_bytes(head[3])
    layout.HEADER.pack_into(raw, 0, *head)
    path.write_bytes(raw)
    if size == "fitting":
        os.truncate(path, max(len(raw), min(layout.file_bytes(head[3]), 1 << 40)))
    honest = head[2:7] == before[2:7] and head[12] == before[12]
    fits = [head[i] for i in (2, 4, 5, 6)] == [before[i] for i in (2, 4, 5, 6)] and 0 < head[3] <= MAX_RING_CAPACITY
    try:
        flight = FlightFile(path)
    except FlightError:
        assert not honest
        return
    with flight:
        assert fits
        assert head[12] == layout.file_bytes(head[3])
        assert len(flight.records()) <= CAPACITY


@relaxed
@given(step=st.one_of(st.integers(0, 2**64 - 1), st.integers(2**64 - 3, 2**64 - 1)), after=st.integers(0, 2**65))
def test_a_last_step_beyond_all_bounds_invents_nothing(tmp_path: Path, step: int, after: int):
    """Whatever the last step claims to be, only records that name the steps up to it are taken, and memory stays bounded."""
    writer = FlightWriter(tmp_path, "rank", {}, capacity=CAPACITY)
    for n in range(4 * 70):
        write_part(writer, n // 4 + 1, n % 4 + 1)
    writer.live[layout.LIVE_STEP] = step
    with FlightFile(writer.path) as flight:
        records = flight.records(after)
    assert all(7 <= int(s) <= 70 and after < int(s) <= step for s in records["step"])
    writer.path.unlink()


@relaxed
@given(version=st.integers(0, 2**32 - 1).filter(lambda v: v != layout.VERSION), rest=st.binary(max_size=300))
def test_other_versions_are_told_by_name(tmp_path: Path, version: int, rest: bytes):
    """A file of another version, of any size and content, says whether it is older or newer, and what to do."""
    path = tmp_path / "other.flight"
    path.write_bytes(layout.MAGIC + version.to_bytes(4, "little") + bytes(layout.HEADER.size) + rest)
    with pytest.raises(FlightVersionError, match=rf"other\.flight: flight file version {version} is ") as raised:
        FlightFile(path)
    assert raised.value.version == version
    assert ("upgrade" if version > layout.VERSION else "restart its vLLM") in str(raised.value)


@relaxed
@given(
    start=st.integers(0, 4 * 2 * CAPACITY),
    bursts=st.dictionaries(st.integers(0, 60), st.integers(1, 5 * CAPACITY), max_size=12),
    steadily=st.integers(0, 6),
    cut=st.one_of(st.integers(0, 200), st.integers(0, layout.HOOKS_BYTES)),
)
def test_a_copy_of_a_live_file_is_whole(tmp_path: Path, start: int, bursts: dict[int, int], steadily: int, cut: int):
    """A copy taken while the rank writes opens, and holds whole records and areas only."""
    writer = FlightWriter(tmp_path, "rank", {"engine": "e"}, capacity=CAPACITY)
    position = 0

    def write(parts: int) -> None:
        nonlocal position
        for _ in range(parts):
            write_part(writer, position // 4 + 1, position % 4 + 1)
            position += 1
            if position % 16 == 0:
                write_everything(writer, position)

    write(start)
    path = tmp_path / "copy.flight"
    with torn(FlightFile(writer.path), write, bursts, cut, steadily=steadily) as flight:
        path.write_bytes(whole_copy(flight))
    ring = path.read_bytes()[layout.RING_OFFSET :]
    with FlightFile(path) as copy:
        records = copy.records()
        assert copy.step() <= position // 4 + 1
        assert copy.identity() == {"engine": "e"}
        for check in CHECKS:
            check(copy)
    for record in records:
        step, phase = int(record["step"]), int(record["phase"])
        assert record["batch_hash"] == step * 7
        assert record["state_sum"] == (step * 3 if phase >= Phase.STATE_UPDATED else 0)
        assert record["mask_hash"] == (step * 5 if phase >= Phase.DECIDED else 0)
    # What is in the ring besides is nothing: no half record stays behind for a reader that is less careful.
    slots = [ring[i : i + layout.STEP_DTYPE.itemsize] for i in range(0, len(ring), layout.STEP_DTYPE.itemsize)]
    assert sum(any(slot) for slot in slots) == len(records)
    writer.path.unlink()


@relaxed
@given(parts=st.integers(0, 4 * 2 * CAPACITY), n=st.integers(0, 1000))
def test_a_copy_at_rest_holds_the_same(tmp_path: Path, parts: int, n: int):
    """A copy of a rank that stands still answers everything as the file itself does."""
    writer = FlightWriter(tmp_path, "rank", {"engine": "e"}, capacity=CAPACITY)
    for part in range(parts):
        write_part(writer, part // 4 + 1, part % 4 + 1)
    write_everything(writer, n)
    path = tmp_path / "copy.flight"
    with FlightFile(writer.path) as flight:
        path.write_bytes(whole_copy(flight))
        with FlightFile(path) as copy:
            assert copy.records().tobytes() == flight.records().tobytes()
            for name in (
                "identity",
                "report",
                "control",
                "requests",
                "histograms",
                "own_time",
                "detail",
                "step",
                "words",
            ):
                assert getattr(copy, name)() == getattr(flight, name)()
            assert copy.device_lengths().tobytes() == flight.device_lengths().tobytes()
            assert (copy.pid, copy.created_unix) == (flight.pid, flight.created_unix)
    writer.path.unlink()
