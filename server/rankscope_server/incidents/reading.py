"""
Opening a capture again. Nothing in it is trusted: it may have come from anywhere.
"""

import io
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from rankscope_exporter.flight import FlightError, open_flight
from rankscope_exporter.flight.layout import file_bytes
from rankscope_exporter.flight.reader import FlightFile
from rankscope_server.incidents.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    CaptureError,
    CaptureManifest,
    CaptureRank,
    parse_manifest,
)

MAX_MEMBERS = 16_385
MAX_FLIGHT_BYTES = file_bytes(1 << 16)
"""
Size of the largest flight file that is taken out of a capture.
"""

DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    NotImplementedError,
)
"""
What the standard library raises at a zip file that lies.
"""


class CaptureFile:
    """
    A capture, opened for reading.

    Raises:
        CaptureError: it cannot be read. Every method can raise it too.

    """

    def __init__(self, data: bytes) -> None:
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(data))
        except DAMAGED as error:
            msg = f"not a capture: {error}"
            raise CaptureError(msg) from error
        if len(self._archive.infolist()) > MAX_MEMBERS:
            msg = f"not a capture: more than {MAX_MEMBERS} files"
            raise CaptureError(msg)
        self.manifest: CaptureManifest = parse_manifest(self._read(MANIFEST_NAME, MAX_MANIFEST_BYTES))

    def flight(self, rank: CaptureRank) -> bytes:
        """
        The flight file of a rank of the manifest.
        """
        return self._read(rank.file, MAX_FLIGHT_BYTES)

    def flights(self) -> Iterator[tuple[CaptureRank, FlightFile]]:
        """
        Each rank that has a flight file, with that file; it is closed, and gone, when the next one is asked for.
        """
        with tempfile.TemporaryDirectory(prefix="rankscope-capture-") as directory:
            for rank in self.manifest.ranks:
                if not rank.file:
                    continue
                path = Path(directory) / rank.file  # one name, without a folder: the manifest was checked for that
                path.write_bytes(self.flight(rank))
                try:
                    with open_flight(path) as flight:
                        yield rank, flight
                except FlightError as error:
                    msg = f"{rank.file} in the capture cannot be read: {error}"
                    raise CaptureError(msg) from error
                finally:
                    path.unlink()

    def _read(self, name: str, limit: int) -> bytes:
        try:
            with self._archive.open(name) as member:
                raw = member.read(limit + 1)
        except KeyError as error:
            msg = f"not a whole capture: it has no {name}"
            raise CaptureError(msg) from error
        except DAMAGED as error:
            msg = f"{name} in the capture is damaged: {error}"
            raise CaptureError(msg) from error
        if len(raw) > limit:
            msg = f"{name} in the capture unpacks to more than {limit} bytes"
            raise CaptureError(msg)
        return raw
