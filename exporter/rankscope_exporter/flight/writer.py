"""
Writing a flight file: the only thing that Rankscope does inside a vLLM worker's step.

A writer is an open mapping plus offsets. It takes no lock, makes no system call after it was opened, and does not
grow. The file's blocks are allocated when it is made: a file system that fills up later can then not turn a store
into a bus error, which would kill vLLM.
"""

import contextlib
import json
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankscope_exporter.flight import layout

RequestRow = tuple[int, int, int, int, int, int, int, int, bytes]
"""
Fields of `layout.REQUEST` in their order.
"""


class FlightWriter:
    """
    A new flight file for this process, and raw access for the recorder.

    `memory` takes `struct.pack_into`; `words`, `live`, `lengths` and `own` are areas as unsigned 64-bit integers.

    Raises:
        OSError: the directory or the file cannot be made, or there is no room for it.

    """

    __slots__ = (
        "_map",
        "_report_sequence",
        "_table_sequence",
        "capacity",
        "device",
        "lengths",
        "live",
        "memory",
        "own",
        "path",
        "words",
    )

    def __init__(
        self, directory: Path, name: str, identity: dict[str, Any], *, capacity: int = layout.RING_CAPACITY
    ) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = directory / f"{name}{layout.SUFFIX}"
        self.capacity = capacity
        size = layout.file_bytes(capacity)
        unfinished = directory / f".{name}.{os.getpid()}"
        try:
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
                # Populated now: a step that touches a page of the ring for the first time must not pay for it.
                self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            finally:
                os.close(descriptor)
            self.memory = memoryview(self._map)
            self.words = self._area(layout.CONTROL_OFFSET, layout.CONTROL_BYTES).cast("Q")
            self.live = self._area(layout.LIVE_OFFSET, layout.LIVE_BYTES).cast("Q")
            self.lengths = self._area(layout.HISTOGRAM_OFFSET, layout.HISTOGRAM_DTYPE.itemsize).cast("Q")
            self.own = self._area(layout.OWN_OFFSET, layout.OWN_DTYPE.itemsize).cast("Q")
            self.device = self._area(layout.DEVICE_OFFSET, layout.DEVICE_BYTES)
            self._report_sequence = self._table_sequence = 0
            layout.HEADER.pack_into(
                self.memory, 0, layout.MAGIC, layout.VERSION, layout.STEP_DTYPE.itemsize, capacity, layout.REQUEST_DTYPE.itemsize,
                layout.TABLE_CAPACITY, layout.BUCKETS, os.getpid(), 0, process_start_ticks(os.getpid()) or 0,
                time.time_ns(), time.monotonic_ns(), size,
            )  # fmt: skip
            self._write_blob(layout.IDENTITY_OFFSET, layout.IDENTITY_BYTES, identity, 0)
            self.write_report({"hooks": [], "mitigations": [], "failure": None})
            # Readers see a whole file or none.
            unfinished.replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def _area(self, offset: int, size: int) -> memoryview:
        return self.memory[offset : offset + size]

    def _write_blob(self, offset: int, size: int, value: dict[str, Any], sequence: int) -> None:
        raw = json.dumps(value, separators=(",", ":")).encode()
        if len(raw) > size - layout.BLOB_HEAD.size:
            msg = f"{len(raw)} bytes of JSON do not fit into {size}"
            raise ValueError(msg)
        layout.BLOB_HEAD.pack_into(self.memory, offset, sequence + 1, len(raw))
        start = offset + layout.BLOB_HEAD.size
        self.memory[start : start + len(raw)] = raw
        layout.BLOB_HEAD.pack_into(self.memory, offset, sequence + 2, len(raw))

    def write_report(self, report: dict[str, Any]) -> None:
        """
        Publish hooks, mitigations and the last failed step: at install, and in the rare step in which they change.
        """
        self._write_blob(layout.HOOKS_OFFSET, layout.HOOKS_BYTES, report, self._report_sequence)
        self._report_sequence += 2

    def write_requests(self, rows: Sequence[RequestRow], drifting: int) -> None:
        """
        Publish the requests that drift most, worst first; at most `layout.TABLE_CAPACITY` rows are taken.
        """
        rows = rows[: layout.TABLE_CAPACITY]
        head, memory = layout.TABLE_HEAD, self.memory
        sequence = self._table_sequence
        head.pack_into(memory, layout.TABLE_OFFSET, sequence + 1, 0, drifting)
        offset = layout.TABLE_OFFSET + layout.TABLE_HEAD_BYTES
        for row in rows:
            layout.REQUEST.pack_into(memory, offset, *row)
            offset += layout.REQUEST.size
        self._table_sequence = sequence + 2
        head.pack_into(memory, layout.TABLE_OFFSET, sequence + 2, len(rows), drifting)


def process_start_ticks(pid: int) -> int | None:
    """
    When a process started, in clock ticks since boot, which together with its pid tells it from a later one.

    None if there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
