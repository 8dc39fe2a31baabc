"""
The flight file under every interleaving and damage that hypothesis can think of.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope_exporter.contract import Phase
from rankscope_exporter.flight import FlightError, FlightFile, layout
from rankscope_exporter.flight.source import FlightSource
from rankscope_exporter.flight.writer import FlightWriter

CAPACITY = 64
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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


def torn(flight: FlightFile, writes: Sequence[Callable[[], None]], cut: int) -> FlightFile:
    """The same file, in whose reads the writer makes `writes`, one in each read."""
    queue = list(writes)
    flight.source = TornSource(flight.source, lambda: queue.pop(0)() if queue else None, cut)
    return flight


@relaxed
@given(
    start=st.integers(1, 4 * 2 * CAPACITY),
    bursts=st.lists(st.integers(0, 5 * CAPACITY), max_size=12),
    cut=st.integers(0, layout.STEP_DTYPE.itemsize),
)
def test_no_record_is_invented_while_the_writer_goes_on(tmp_path: Path, start: int, bursts: list[int], cut: int):
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
        records = torn(flight, [functools.partial(write, burst) for burst in bursts], cut).records()
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
        records = flight.records()
        assert len(records) <= CAPACITY
        assert list(records["step"]) == sorted(set(map(int, records["step"])))
        for read in (flight.identity, flight.report):
            with contextlib.suppress(FlightError):
                assert isinstance(read(), dict)
        with contextlib.suppress(FlightError):
            drifting, rows = flight.requests()
            assert drifting >= 0
            assert len(rows) <= layout.TABLE_CAPACITY
        flight.control()
        flight.histograms()


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
