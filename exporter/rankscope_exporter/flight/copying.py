"""
A consistent copy of a flight file whose rank goes on writing.

Copying the bytes would catch the file in the middle of a store: half a record, half a table. So the copy is put together
from what a reader would take: whole records only, each whole up to its phase, and areas whose sequence word was even.
Where that cannot be had, because the rank died in the middle of a store, the copy says so in the file's own way: the
sequence word is odd, the slot is empty.
"""

import numpy as np

from rankscope_exporter.flight import layout
from rankscope_exporter.flight.errors import FlightError
from rankscope_exporter.flight.reader import FlightFile

ATTEMPTS = 4
"""
Copies made in the hope that the rank begins no step meanwhile: then all areas are of one moment.
"""


def whole_copy(flight: FlightFile) -> bytes:
    """
    The bytes of a flight file that holds what `flight` holds now.

    Every area and record is whole. They are of the same step if the rank left the time for that; a rank that begins a step
    more often than a copy takes (about a millisecond) can have areas that are a few steps newer than the last record.

    Raises:
        FlightError: the file was cut short.

    """
    image = _assemble(flight)
    for _ in range(ATTEMPTS - 1):
        if _last_step(image) == flight.step():
            break
        image = _assemble(flight)
    return bytes(image)


def _last_step(image: bytearray) -> int:
    step: int = layout.WORD.unpack_from(image, layout.LIVE_OFFSET + 8 * layout.LIVE_STEP)[0]
    return step


def _assemble(flight: FlightFile) -> bytearray:
    image = bytearray(layout.file_bytes(flight.ring_capacity))

    def put(offset: int, raw: bytes) -> None:
        image[offset : offset + len(raw)] = raw

    put(0, flight.source.read(0, layout.HEADER_BYTES))
    # The live words come first: they name the last step, and every record of a step up to it is in the ring by then.
    size = layout.HISTOGRAM_OFFSET - layout.CONTROL_OFFSET
    put(layout.CONTROL_OFFSET, flight.steady(layout.CONTROL_OFFSET, size))
    records = flight.records()
    slots = np.frombuffer(image, layout.STEP_DTYPE, flight.ring_capacity, layout.RING_OFFSET)
    kept = records[records["step"] <= _last_step(image)]
    slots[kept["step"] % np.uint64(flight.ring_capacity)] = kept
    del slots  # a view of the image, which could not be changed in size under it
    for offset, size in (
        (layout.HISTOGRAM_OFFSET, layout.HISTOGRAM_BYTES),
        (layout.OWN_OFFSET, layout.OWN_BYTES),
        (layout.DEVICE_OFFSET, layout.DEVICE_BYTES),
    ):
        put(offset, flight.steady(offset, size))
    for offset, size in (
        (layout.IDENTITY_OFFSET, layout.IDENTITY_BYTES),
        (layout.HOOKS_OFFSET, layout.HOOKS_BYTES),
    ):
        put(offset, _blob(flight, offset, size))
    sequence, drifting, rows = flight.table()
    count = len(rows) // layout.REQUEST_DTYPE.itemsize
    put(layout.TABLE_OFFSET, layout.TABLE_HEAD.pack(sequence, count, drifting))
    put(layout.TABLE_OFFSET + layout.TABLE_HEAD_BYTES, rows)
    return image


def _blob(flight: FlightFile, offset: int, size: int) -> bytes:
    try:
        sequence, raw = flight.blob(offset, size)
    except FlightError:  # it lies about its length: evidence too
        return flight.source.read(offset, size)
    return layout.BLOB_HEAD.pack(sequence, len(raw)) + raw
