"""
Reading flight files: another process's memory, so nothing in them is trusted and nothing is waited for.
"""

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract.words import ControlOutcome, Detail, MitigationState, Phase
from rankscope_exporter.flight import layout

if TYPE_CHECKING:
    from typing_extensions import Self

RETRIES = 8
"""
Attempts to read something that is being written, before the last good answer or none is given.
"""


class FlightError(Exception):
    """
    A file that is no flight file, one of another version, or one that is cut short; the message says which.
    """


@dataclass(frozen=True, slots=True)
class RequestTableRow:
    """
    One row of the request table; `margin` is None where it is not known.
    """

    request_id: str
    state_length: int
    scheduler_length: int
    drift: int
    masked: bool
    margin: int | None
    first_drift_step: int
    step: int


@dataclass(frozen=True, slots=True)
class Control:
    """
    The control area: what was asked for, and what the rank did with it.
    """

    requested_word: int
    observed_word: int
    acted_word: int
    acted_step: int
    outcome: ControlOutcome
    mitigation_state: MitigationState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    A consistent copy of the lengths' histograms (cumulative counts per bucket of `layout.BUCKET_BOUNDS`, not summed up).
    """

    state: tuple[int, ...]
    scheduler: tuple[int, ...]
    state_sum: int
    scheduler_sum: int
    samples: int


@dataclass(frozen=True, slots=True)
class OwnTime:
    """
    Measured steps per bucket of `layout.OWN_BOUNDS` (not summed up), and their time in seconds.
    """

    steps: tuple[int, ...]
    seconds: float


class FlightFile:
    """
    A flight file, mapped for reading. The caller closes it (`with` works).

    Raises:
        FlightError: it cannot be read, is of another version, or lies about its size.

    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        self._blobs: dict[int, tuple[int, Any]] = {}
        self.key = path.name.removesuffix(layout.SUFFIX)
        try:
            with path.open("r+b" if writable else "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < layout.RING_OFFSET:
                    msg = f"{path.name}: {size} bytes are too few for a flight file"
                    raise FlightError(msg)
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                self._map = mmap.mmap(file.fileno(), size, access=access)
        except OSError as error:
            msg = f"{path.name}: {error.strerror}"
            raise FlightError(msg) from error
        try:
            self._read_header(size)
        except BaseException:
            self._map.close()
            raise
        self._ring = np.frombuffer(self._map, layout.STEP_DTYPE, self.ring_capacity, layout.RING_OFFSET)
        self._words = np.frombuffer(
            self._map, "<u8", (layout.CONTROL_BYTES + layout.LIVE_BYTES) // 8, layout.CONTROL_OFFSET
        )
        self._live = self._words[layout.CONTROL_BYTES // 8 :]

    def _read_header(self, size: int) -> None:
        head = layout.HEADER.unpack_from(self._map, 0)
        magic, version, record, ring, entry, table, buckets, pid, _, start, wall, monotonic, total = head
        if magic != layout.MAGIC:
            msg = f"{self.path.name}: not a flight file"
            raise FlightError(msg)
        if version != layout.VERSION:
            msg = f"{self.path.name}: flight file version {version}, this reader knows {layout.VERSION}: upgrade the older side"
            raise FlightError(msg)
        expected = (layout.STEP_DTYPE.itemsize, layout.REQUEST_DTYPE.itemsize, layout.TABLE_CAPACITY, layout.BUCKETS)
        if (record, entry, table, buckets) != expected or ring == 0:
            msg = f"{self.path.name}: sizes in the header do not fit version {version}"
            raise FlightError(msg)
        if total != layout.file_bytes(ring) or size < total:
            msg = f"{self.path.name}: {size} bytes where {layout.file_bytes(ring)} belong: cut short"
            raise FlightError(msg)
        self.ring_capacity: int = ring
        self.pid: int = pid
        self.process_start_ticks: int = start
        self.created_unix: float = wall / 1e9
        self.created_monotonic_ns: int = monotonic

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """
        Unmap the file; what was read stays valid.
        """
        del self._ring, self._words, self._live
        with contextlib.suppress(BufferError):  # a caller still holds a view: the map goes with it
            self._map.close()

    def _blob(self, offset: int, size: int) -> Any:
        for _ in range(RETRIES):
            sequence, length = layout.BLOB_HEAD.unpack_from(self._map, offset)
            known = self._blobs.get(offset)
            if known is not None and known[0] == sequence:
                return known[1]
            if sequence % 2 or length > size - layout.BLOB_HEAD.size:
                continue
            start = offset + layout.BLOB_HEAD.size
            raw = self._map[start : start + length]
            if layout.BLOB_HEAD.unpack_from(self._map, offset) != (sequence, length):
                continue
            try:
                value = json.loads(raw)
            except ValueError:
                break
            self._blobs[offset] = (sequence, value)
            return value
        msg = f"{self.path.name}: unreadable JSON area"
        raise FlightError(msg)

    def identity(self) -> dict[str, Any]:
        """
        Who the rank is (`contract.RankIdentity` as JSON). Not to be changed: the same one is given until the rank writes anew.

        Raises:
            FlightError: the area is damaged.

        """
        return self._mapping(self._blob(layout.IDENTITY_OFFSET, layout.IDENTITY_BYTES))

    def report(self) -> dict[str, Any]:
        """
        Hooks, mitigations and the last failed step as the rank wrote them. Not to be changed, as `identity`.

        Raises:
            FlightError: the area is damaged.

        """
        return self._mapping(self._blob(layout.HOOKS_OFFSET, layout.HOOKS_BYTES))

    def _mapping(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            msg = f"{self.path.name}: unreadable JSON area"
            raise FlightError(msg)
        return value

    def step(self) -> int:
        """
        Ordinal of the last step that the rank began; 0 before the first.
        """
        return int(self._live[layout.LIVE_STEP])

    def detail(self) -> Detail:
        """
        What the rank still records.
        """
        return Detail(_member(Detail, int(self._live[layout.LIVE_DETAIL]), Detail.CUT))

    def failed_steps(self) -> tuple[int, int]:
        """
        How many steps an error of vLLM has ended, and the last of them (0: none).
        """
        return int(self._live[layout.LIVE_FAILED_STEPS]), int(self._live[layout.LIVE_FAILED_STEP])

    def faults(self) -> int:
        """
        Errors of ours that hooks swallowed.
        """
        return int(self._live[layout.LIVE_FAULTS])

    def control(self) -> Control:
        """
        The control area.
        """
        words = self._words
        outcome = int(words[layout.ACK_OUTCOME])  # first: the rank writes it last
        return Control(
            requested_word=int(words[layout.CONTROL_REQUEST]),
            observed_word=int(words[layout.ACK_OBSERVED]),
            acted_word=int(words[layout.ACK_WORD]),
            acted_step=int(words[layout.ACK_STEP]),
            outcome=_member(ControlOutcome, outcome, ControlOutcome.NONE),
            mitigation_state=_member(MitigationState, int(words[layout.ACK_STATE]), MitigationState.UNKNOWN_CODE),
        )

    def request_control(self, word: int) -> None:
        """
        Write the control word: one aligned store, seen by the rank at its next step. Needs `writable`.
        """
        memoryview(self._map)[layout.CONTROL_OFFSET : layout.CONTROL_OFFSET + 8].cast("Q")[0] = word

    def records(self, after: int = 0) -> npt.NDArray[np.void]:
        """
        Copies of the step records that the ring still holds with step > `after`, oldest first.

        Only whole parts are taken: what lies beyond a record's phase is zero. A record that is being begun, or that
        the writer overtook while it was copied, is left out.
        """
        last = self.step()
        first = max(after + 1, last - self.ring_capacity + 1, 1)
        if first > last:
            return np.zeros(0, layout.STEP_DTYPE)
        slots = np.arange(first, last + 1, dtype=np.uint64) % np.uint64(self.ring_capacity)
        phase_before = self._ring["phase"][slots]
        copies = self._ring[slots]
        steady = (self._ring["step"][slots] == copies["step"]) & (self._ring["phase"][slots] >= phase_before)
        expected = np.arange(first, last + 1, dtype=np.uint64)
        whole = steady & (copies["step"] == expected) & (phase_before > Phase.WRITING) & (phase_before <= Phase.DONE)
        copies["phase"] = phase_before
        records: npt.NDArray[np.void] = copies[whole]
        raw = records.view(np.uint8).reshape(len(records), layout.STEP_DTYPE.itemsize)
        for index in np.flatnonzero(records["phase"] < Phase.DONE).tolist():  # at most the last one, as a rule
            raw[index, _REACHES[Phase(records["phase"][index])] : layout.FAILED_OFFSET] = 0
        return records

    def requests(self) -> tuple[int, list[RequestTableRow]]:
        """
        How many requests drift, and those of them that drift most, worst first.
        """
        start = layout.TABLE_OFFSET + layout.TABLE_HEAD_BYTES
        for _ in range(RETRIES):
            sequence, rows, drifting = layout.TABLE_HEAD.unpack_from(self._map, layout.TABLE_OFFSET)
            if sequence % 2 or rows > layout.TABLE_CAPACITY:
                continue
            table = np.frombuffer(self._map[start : start + rows * layout.REQUEST_DTYPE.itemsize], layout.REQUEST_DTYPE)
            if layout.TABLE_HEAD.unpack_from(self._map, layout.TABLE_OFFSET)[0] == sequence:
                return drifting, [_row(row) for row in table]
        return 0, []

    def histograms(self) -> Snapshot:
        """
        Lengths of requests, sampled every few steps by the rank.
        """
        raw = np.frombuffer(self._map, layout.HISTOGRAM_DTYPE, 1, layout.HISTOGRAM_OFFSET)[0].copy()
        return Snapshot(
            tuple(raw["state"].tolist()),
            tuple(raw["scheduler"].tolist()),
            int(raw["state_sum"]),
            int(raw["scheduler_sum"]),
            int(self._live[layout.LIVE_SAMPLES]),
        )

    def own_time(self) -> OwnTime:
        """
        What the hooks cost in the steps in which that was measured.
        """
        raw = np.frombuffer(self._map, layout.OWN_DTYPE, 1, layout.OWN_OFFSET)[0].copy()
        return OwnTime(tuple(raw["steps"].tolist()), int(raw["sum_ns"]) / 1e9)

    def device_lengths(self) -> np.void | None:
        """
        The last sample of device-side lengths (`layout.DEVICE_DTYPE`); None while there is none, or while it is being written.
        """
        for _ in range(RETRIES):
            raw = np.frombuffer(self._map, layout.DEVICE_DTYPE, 1, layout.DEVICE_OFFSET)[0].copy()
            sequence = int(raw["sequence"])
            if sequence % 2 == 0 and layout.WORD.unpack_from(self._map, layout.DEVICE_OFFSET)[0] == sequence:
                return raw if raw["every"] else None
        return None


_REACHES = {
    Phase.SCHEDULED: layout.PART_STATE_OFFSET,
    Phase.STATE_UPDATED: layout.PART_DECIDED_OFFSET,
    Phase.DECIDED: layout.PART_DONE_OFFSET,
}
"""
Bytes of a record that are written when it is in that phase.
"""


def _member(kind: Any, value: int, default: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        return default


def _row(row: np.void) -> RequestTableRow:
    margin = int(row["margin"])
    return RequestTableRow(
        request_id=row["request_id"].tobytes()[: int(row["id_length"])].decode(errors="replace"),
        state_length=int(row["state_length"]),
        scheduler_length=int(row["scheduler_length"]),
        drift=int(row["drift"]),
        masked=bool(row["masked"]),
        margin=None if margin == layout.MARGIN_UNKNOWN else margin,
        first_drift_step=int(row["first_drift_step"]),
        step=int(row["step"]),
    )


def list_flight_files(directory: Path) -> Iterator[Path]:
    """
    Paths of the flight files in `directory`, sorted; none if it is not there.
    """
    with contextlib.suppress(FileNotFoundError):
        yield from sorted(directory.glob(f"*{layout.SUFFIX}"))
