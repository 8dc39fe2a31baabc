"""
Reading flight files: another process's memory, so nothing in them is trusted and nothing is waited for.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract.words import Detail, Phase
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.areas import (
    Control,
    OwnTime,
    RequestTableRow,
    Snapshot,
    control_of,
    json_mapping,
    member,
    request_rows,
)
from rankscope_exporter.flight.errors import FlightError, FlightVersionError
from rankscope_exporter.flight.source import FlightSource

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Control",
    "FlightError",
    "FlightFile",
    "OwnTime",
    "RequestTableRow",
    "Snapshot",
    "list_flight_files",
    "open_flight",
]

RETRIES = 32
"""
Attempts to read something that is being written, before the last good answer or none is given.
"""
MAX_RING_CAPACITY = 1 << 20
"""
Steps of the largest ring that a rank can be told to keep; a header that claims more is a lie.
"""
BLOCK = 8192
"""
Records looked at in one go.
"""

_WORDS = struct.Struct(f"<{(layout.CONTROL_BYTES + layout.LIVE_BYTES) // 8}Q")
_LIVE = layout.CONTROL_BYTES // 8
# Plain numbers: NumPy takes four times as long to compare with a member of an enumeration.
_WRITING, _DONE = int(Phase.WRITING), int(Phase.DONE)
_REACHES = {
    int(Phase.SCHEDULED): layout.PART_STATE_OFFSET,
    int(Phase.STATE_UPDATED): layout.PART_DECIDED_OFFSET,
    int(Phase.DECIDED): layout.PART_DONE_OFFSET,
}
"""
Bytes of a record that are written when it is in that phase.
"""


class FlightFile:
    """
    A flight file, opened for reading. The caller closes it (`with` works).

    The rank goes on while it is read. Each answer is whole by itself; two answers may be some steps apart.

    Raises:
        FlightError: it cannot be read, or lies about its size. Every method can raise it too: the file may be cut short
            or damaged at any time.
        FlightVersionError: it is of another version.

    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        self.key = path.name.removesuffix(layout.SUFFIX)
        """Name of the file without its suffix, by which the exporter calls this rank."""
        self._blobs: dict[int, tuple[int, dict[str, Any]]] = {}
        self._table: tuple[int, list[RequestTableRow]] | None = None
        self.source = FlightSource(path, writable=writable)
        try:
            self._read_header()
        except BaseException:
            self.source.close()
            raise

    def _read_header(self) -> None:
        name, size = self.path.name, self.source.size
        if size < layout.HEADER.size:
            msg = f"{name}: {size} bytes are too few for a flight file"
            raise FlightError(msg)
        head = layout.HEADER.unpack(self.source.read(0, layout.HEADER.size))
        magic, version, record, ring, entry, table, buckets, pid, _, start, wall, monotonic, total = head
        if magic != layout.MAGIC:
            msg = f"{name}: not a flight file"
            raise FlightError(msg)
        if version != layout.VERSION:
            raise FlightVersionError(name, version, layout.VERSION)
        expected = (layout.STEP_DTYPE.itemsize, layout.REQUEST_DTYPE.itemsize, layout.TABLE_CAPACITY, layout.BUCKETS)
        if (record, entry, table, buckets) != expected or not 0 < ring <= MAX_RING_CAPACITY:
            msg = f"{name}: sizes in the header do not fit version {version}"
            raise FlightError(msg)
        if total != layout.file_bytes(ring) or size < total:
            msg = f"{name}: {size} bytes where {layout.file_bytes(ring)} belong: cut short"
            raise FlightError(msg)
        self.version: int = version
        self.ring_capacity: int = ring
        """Steps that the ring holds."""
        self.pid: int = pid
        self.process_start_ticks: int = start
        """When the process started, in clock ticks since boot, which tells it from a later one with its number; 0: unknown."""
        self.created_unix: float = wall / 1e9
        self.created_monotonic_ns: int = monotonic

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """
        Close the file; what was read stays valid. Is idempotent.
        """
        self.source.close()

    def wall_time(self, monotonic_ns: int) -> float | None:
        """
        Wall-clock second of a time in a record, by the clocks of the machine that wrote it; None if it makes no sense.

        Right also for a copy on another machine. A wall clock that was set since the file was made is not followed.
        """
        if not self.created_monotonic_ns <= monotonic_ns < 1 << 63 or self.created_unix <= 0:
            return None
        return self.created_unix + (monotonic_ns - self.created_monotonic_ns) / 1e9

    def steady(self, offset: int, size: int) -> bytes:
        """
        An area of words without a sequence of its own, read until two looks agree: one look may fall into a store.
        """
        raw = self.source.read(offset, size)
        for _ in range(RETRIES):
            again = self.source.read(offset, size)
            if again == raw:
                break
            raw = again
        return raw

    def blob(self, offset: int, size: int) -> tuple[int, bytes]:
        """
        Sequence word and bytes of the JSON area at `offset`; an odd sequence if it was being written all the time.

        Raises:
            FlightError: it claims to be longer than the area.

        """
        head = layout.BLOB_HEAD
        for _ in range(RETRIES):
            raw = self.source.read(offset, size)
            sequence, length = head.unpack_from(raw)
            if sequence % 2 == 0 and head.unpack(self.source.read(offset, head.size)) == (sequence, length):
                if length > size - head.size:
                    msg = f"{self.path.name}: unreadable JSON area: {length} bytes in {size}"
                    raise FlightError(msg)
                return sequence, raw[head.size : head.size + length]
        return 1, b""

    def _mapping(self, offset: int, size: int) -> dict[str, Any]:
        known = self._blobs.get(offset)
        if known is not None and known[0] == layout.WORD.unpack(self.source.read(offset, layout.WORD.size))[0]:
            return known[1]
        sequence, raw = self.blob(offset, size)
        if sequence % 2:
            if known is not None:
                return known[1]
            msg = f"{self.path.name}: unreadable JSON area: the rank left it half written"
            raise FlightError(msg)
        try:
            value = json_mapping(raw)
        except ValueError as error:
            msg = f"{self.path.name}: unreadable JSON area: {error}"
            raise FlightError(msg) from error
        self._blobs[offset] = (sequence, value)
        return value

    def identity(self) -> dict[str, Any]:
        """
        Who the rank is (`contract.RankIdentity` as JSON). Not to be changed: the same one is given until the rank writes anew.

        Raises:
            FlightError: the area is damaged.

        """
        return self._mapping(layout.IDENTITY_OFFSET, layout.IDENTITY_BYTES)

    def report(self) -> dict[str, Any]:
        """
        `hooks`, `mitigations` and `failure` (the last failed step) as the rank wrote them. Not to be changed, as `identity`.

        Raises:
            FlightError: the area is damaged.

        """
        return self._mapping(layout.HOOKS_OFFSET, layout.HOOKS_BYTES)

    def words(self) -> tuple[int, ...]:
        """
        The control area and the live words after it, as they stood at one moment.
        """
        return _WORDS.unpack(self.steady(layout.CONTROL_OFFSET, _WORDS.size))

    def _live(self, index: int) -> int:
        return self.words()[_LIVE + index]

    def step(self) -> int:
        """
        Ordinal of the last step that the rank began; 0 before the first.
        """
        return self._live(layout.LIVE_STEP)

    def detail(self) -> Detail:
        """
        What the rank still records.
        """
        return Detail(member(Detail, self._live(layout.LIVE_DETAIL), Detail.CUT))

    def failed_steps(self) -> tuple[int, int]:
        """
        How many steps an error of vLLM has ended, and the last of them (0: none).
        """
        words = self.words()
        return words[_LIVE + layout.LIVE_FAILED_STEPS], words[_LIVE + layout.LIVE_FAILED_STEP]

    def faults(self) -> int:
        """
        Errors of ours that hooks swallowed.
        """
        return self._live(layout.LIVE_FAULTS)

    def control(self) -> Control:
        """
        The control area.
        """
        return control_of(self.words())

    def request_control(self, word: int) -> None:
        """
        Write the control word: one aligned store, seen by the rank at its next step. Needs `writable`.
        """
        self.source.store(layout.CONTROL_OFFSET + 8 * layout.CONTROL_REQUEST, word)

    def records(self, after: int = 0) -> npt.NDArray[np.void]:
        """
        Copies of the step records (`layout.STEP_DTYPE`) that the ring still holds with step > `after`, oldest first.

        Only whole parts are taken: what lies beyond a record's phase is zero. A record that is being begun, or that
        the writer overtook while it was copied, is left out.
        """
        last = self.step()
        first = max(after + 1, last - self.ring_capacity + 1, 1)
        if first > last:
            return np.zeros(0, layout.STEP_DTYPE)
        blocks = [self._whole(begin, min(begin + BLOCK, last + 1)) for begin in range(first, last + 1, BLOCK)]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def _whole(self, first: int, end: int) -> npt.NDArray[np.void]:
        """
        The records of steps `first` to `end` - 1 that are whole up to their phase: phase, copy, and step again, in this order.
        """
        steps = np.arange(end - first, dtype=np.uint64) + np.uint64(first)
        phases = self._slots(first, end)["phase"]
        copies = self._slots(first, end)
        later = self._slots(first, end)
        whole = (copies["step"] == steps) & (later["step"] == steps) & (later["phase"] >= phases)
        whole &= (phases > _WRITING) & (phases <= _DONE)
        # Rows of bytes are chosen at a tenth of the price of records.
        raw = copies.view(np.uint8).reshape(end - first, layout.STEP_DTYPE.itemsize)[whole]
        records: npt.NDArray[np.void] = raw.view(layout.STEP_DTYPE).reshape(-1)
        records["phase"] = phases[whole]
        if (records["phase"] < _DONE).any():  # the last one, as a rule
            for phase, reach in _REACHES.items():
                raw[records["phase"] == phase, reach : layout.FAILED_OFFSET] = 0
        return records

    def _slots(self, first: int, end: int) -> npt.NDArray[np.void]:
        """
        The slots of the ring for steps `first` to `end` - 1, in the order of the steps, whatever is in them.
        """
        slot, count, size = first % self.ring_capacity, end - first, layout.STEP_DTYPE.itemsize
        until_end = min(count, self.ring_capacity - slot)
        raw = self.source.read(layout.RING_OFFSET + slot * size, until_end * size)
        if until_end < count:
            raw += self.source.read(layout.RING_OFFSET, (count - until_end) * size)
        return np.frombuffer(raw, layout.STEP_DTYPE)

    def table(self) -> tuple[int, int, bytes]:
        """
        Sequence word of the request table, how many requests drift, and the rows; an odd sequence if it was being written
        all the time.
        """
        head, offset = layout.TABLE_HEAD, layout.TABLE_OFFSET
        for _ in range(RETRIES):
            raw = self.source.read(offset, layout.TABLE_BYTES)
            sequence, rows, drifting = head.unpack_from(raw)
            if sequence % 2 or rows > layout.TABLE_CAPACITY:
                continue
            if head.unpack(self.source.read(offset, head.size)) == (sequence, rows, drifting):
                start = layout.TABLE_HEAD_BYTES
                return sequence, drifting, raw[start : start + rows * layout.REQUEST_DTYPE.itemsize]
        return 1, 0, b""

    def requests(self) -> tuple[int, list[RequestTableRow]]:
        """
        How many requests drift, and those of them that drift most, worst first.

        The last good answer stands in while the rank writes a new one.

        Raises:
            FlightError: the table is damaged, or the rank left it half written before it could be read once.

        """
        sequence, drifting, raw = self.table()
        if sequence % 2:
            if self._table is not None:
                return self._table
            msg = f"{self.path.name}: the request table is damaged or half written"
            raise FlightError(msg)
        self._table = drifting, request_rows(np.frombuffer(raw, layout.REQUEST_DTYPE))
        return self._table

    def histograms(self) -> Snapshot:
        """
        Lengths of requests, sampled every few steps by the rank.
        """
        samples = self._live(layout.LIVE_SAMPLES)
        raw = np.frombuffer(
            self.steady(layout.HISTOGRAM_OFFSET, layout.HISTOGRAM_DTYPE.itemsize), layout.HISTOGRAM_DTYPE
        )[0]
        return Snapshot(
            tuple(raw["state"].tolist()),
            tuple(raw["scheduler"].tolist()),
            int(raw["state_sum"]),
            int(raw["scheduler_sum"]),
            samples,
        )

    def own_time(self) -> OwnTime:
        """
        What the hooks cost in the steps in which that was measured.
        """
        raw = np.frombuffer(self.steady(layout.OWN_OFFSET, layout.OWN_DTYPE.itemsize), layout.OWN_DTYPE)[0]
        return OwnTime(tuple(raw["steps"].tolist()), int(raw["sum_ns"]) / 1e9)

    def device_lengths(self) -> np.void | None:
        """
        The last sample of device-side lengths (`layout.DEVICE_DTYPE`); None while there is none, or while it is being written.
        """
        for _ in range(RETRIES):
            sample: np.void = np.frombuffer(
                self.source.read(layout.DEVICE_OFFSET, layout.DEVICE_DTYPE.itemsize), layout.DEVICE_DTYPE
            )[0]
            sequence = int(sample["sequence"])
            again = layout.WORD.unpack(self.source.read(layout.DEVICE_OFFSET, layout.WORD.size))[0]
            if sequence % 2 == 0 and again == sequence:
                return sample if sample["every"] else None
        return None


def open_flight(path: Path | str) -> FlightFile:
    """
    Open a flight file for reading, live or copied.

        with open_flight("engine-dp0-pp0-tp0-4711.flight") as flight:
            print(flight.identity()["engine"], flight.records(after=100)["drift_max"])

    Raises:
        FlightError: it cannot be read; `FlightVersionError` if it is of another version.

    """
    return FlightFile(Path(path))


def list_flight_files(directory: Path | str) -> Iterator[Path]:
    """
    Paths of the flight files in `directory`, sorted; none if it is not there, or not to be listed by us. Links and other
    special files are left out.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(directory) as entries:
        names = sorted(e.name for e in entries if e.name.endswith(layout.SUFFIX) and e.is_file(follow_symlinks=False))
        yield from (Path(directory) / name for name in names)
