"""
A flight file made of values: what a rank would have left behind, had it done these steps.

For whoever has the records, and no file any more: the frozen copy of an incident, and cases made from a description. A
rank itself writes through `writer`, which is bound to its process and its clocks.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract.words import Detail
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.reader import MAX_RING_CAPACITY
from rankscope_exporter.flight.writer import RequestRow

_SETTLED = 2
"""
Sequence word of an area that was written once, and is not being written now.
"""


def compose_flight(
    identity: Mapping[str, Any],
    report: Mapping[str, Any],
    records: npt.NDArray[np.void],
    *,
    created_unix: float,
    created_monotonic_ns: int,
    pid: int = 0,
    process_start_ticks: int = 0,
    table: Sequence[RequestRow] = (),
    drifting: int = 0,
    control: Sequence[int] = (),
    faults: int = 0,
    detail: Detail = Detail.FULL,
    device: Mapping[str, int] | None = None,
    capacity: int | None = None,
) -> bytes:
    """
    The bytes of a flight file that holds these values, as if its rank had written them.

    `identity` and `report` are what `FlightFile.identity` and `report` shall give; `records` are step records
    (`layout.STEP_DTYPE`) in any order, of which the newest is the rank's last step. `created_unix` (seconds) and
    `created_monotonic_ns` are one moment on both clocks of the rank's node. `pid` 0 says that no process is known. `table`
    holds the requests that drift most, worst first, as `RequestRow`s; those beyond `layout.TABLE_CAPACITY` are left out.
    `control` are words of the control area by their index (`layout.CONTROL_REQUEST`, `ACK_OBSERVED`, ...), and those it
    does not reach are 0. `device` are fields of a sample of device-side lengths by name (`layout.DEVICE_DTYPE`), and those
    that it does not name are 0. `capacity` is that of the ring in steps; without it, it is just as large as the records
    need, and with it a ring that is too small keeps the newest ones, as a rank's does.

    Histograms are empty: what they count is not in step records.

    Raises:
        ValueError: a value does not fit into a flight file; the message says which.

    """
    if len(records) and not records["step"].all():
        msg = "a record of step 0: steps are counted from 1"
        raise ValueError(msg)
    if len(control) > layout.CONTROL_BYTES // 8:
        msg = f"{len(control)} words do not fit into the control area, which has {layout.CONTROL_BYTES // 8}"
        raise ValueError(msg)
    ring = _capacity(records) if capacity is None else capacity
    if not 0 < ring <= MAX_RING_CAPACITY:
        msg = f"a ring of {ring} steps: it can have 1 to {MAX_RING_CAPACITY}"
        raise ValueError(msg)
    image = bytearray(layout.file_bytes(ring))
    _pack(
        layout.HEADER, image, 0, "the header", layout.MAGIC, layout.VERSION, layout.STEP_DTYPE.itemsize, ring, layout.REQUEST_DTYPE.itemsize,
        layout.TABLE_CAPACITY, layout.BUCKETS, pid, 0, process_start_ticks, round(created_unix * 1e9), created_monotonic_ns, len(image),
    )  # fmt: skip
    _put_blob(image, layout.IDENTITY_OFFSET, layout.IDENTITY_BYTES, identity)
    _put_blob(image, layout.HOOKS_OFFSET, layout.HOOKS_BYTES, report)
    _put_words(image, layout.CONTROL_OFFSET, dict(enumerate(control)))
    _put_words(image, layout.LIVE_OFFSET, _live_words(records, report, faults, detail))
    if device is not None:
        values = {"sequence": _SETTLED} | dict(device)
        fields = [values.get(name, 0) for name in layout.DEVICE_DTYPE.names or ()]
        _pack(layout.DEVICE, image, layout.DEVICE_OFFSET, "the area of device lengths", *fields)
    _put_table(image, table[: layout.TABLE_CAPACITY], drifting)
    _put_records(image, ring, records)
    return bytes(image)


def _pack(area: struct.Struct, image: bytearray, offset: int, name: str, *values: Any) -> None:
    try:
        area.pack_into(image, offset, *values)
    except struct.error as error:
        msg = f"{name} does not hold {values}: {error}"
        raise ValueError(msg) from error


def _capacity(records: npt.NDArray[np.void]) -> int:
    return int(records["step"].max() - records["step"].min()) + 1 if len(records) else 1


def _live_words(
    records: npt.NDArray[np.void], report: Mapping[str, Any], faults: int, detail: Detail
) -> dict[int, int]:
    """
    The live words by their index. How many steps failed is what can be seen of it: those in `records`, and the one that
    `report` tells of.
    """
    failed = set(records["step"][records["failed"] > 0].tolist())
    failure = report.get("failure")
    if failure is not None:
        failed.add(int(failure["step"]))
    return {
        layout.LIVE_STEP: int(records["step"].max()) if len(records) else 0,
        layout.LIVE_FAULTS: faults,
        layout.LIVE_DETAIL: int(detail),
        layout.LIVE_FAILED_STEPS: len(failed),
        layout.LIVE_FAILED_STEP: max(failed, default=0),
    }


def _put_blob(image: bytearray, offset: int, size: int, value: Mapping[str, Any]) -> None:
    raw = json.dumps(value, separators=(",", ":")).encode()
    room = size - layout.BLOB_HEAD.size
    if len(raw) > room:
        msg = f"{len(raw)} bytes of JSON do not fit into {room}"
        raise ValueError(msg)
    layout.BLOB_HEAD.pack_into(image, offset, _SETTLED, len(raw))
    start = offset + layout.BLOB_HEAD.size
    image[start : start + len(raw)] = raw


def _put_words(image: bytearray, offset: int, words: Mapping[int, int]) -> None:
    for index, word in words.items():
        _pack(layout.WORD, image, offset + 8 * index, "a word", word)


def _put_table(image: bytearray, rows: Sequence[RequestRow], drifting: int) -> None:
    _pack(layout.TABLE_HEAD, image, layout.TABLE_OFFSET, "the request table", _SETTLED, len(rows), drifting)
    for index, row in enumerate(rows):
        offset = layout.TABLE_OFFSET + layout.TABLE_HEAD_BYTES + index * layout.REQUEST.size
        _pack(layout.REQUEST, image, offset, f"row {index} of the request table", *row)


def _put_records(image: bytearray, ring: int, records: npt.NDArray[np.void]) -> None:
    if len(records) == 0:
        return
    kept = records[records["step"].argsort(kind="stable")]
    kept = kept[kept["step"] + np.uint64(ring) > kept["step"][-1]]
    slots = np.frombuffer(image, layout.STEP_DTYPE, ring, layout.RING_OFFSET)
    slots[kept["step"] % np.uint64(ring)] = kept
