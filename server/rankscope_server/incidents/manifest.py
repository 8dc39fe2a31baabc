"""
What a capture says of itself: `capture.json`, beside its flight files.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankscope_exporter.contract import RankLife
from rankscope_exporter.flight.layout import SUFFIX
from rankscope_server.domain.incident import IncidentLife

MANIFEST_NAME = "capture.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 16 << 20

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.flight")
"""
Names that flight files have in a capture: of one folder, and harmless wherever they are unpacked.
"""


class CaptureError(Exception):
    """
    A capture that cannot be read; the message says why.
    """


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CaptureClock(_Part):
    """
    The clocks of a rank's node at one moment, which is when the copy was made, as far as the server knows.
    """

    monotonic_ns: Annotated[int, Field(ge=0, lt=1 << 63)]
    unix: float


class CaptureRank(_Part):
    """
    One rank of a capture.
    """

    file: str
    """Name of its flight file; empty where it has none, and `problem` says why."""
    key: str
    label: str
    dp_rank: int
    pp_rank: int
    tp_rank: int
    life: RankLife
    """What was known of its process at the last answer of its exporter."""
    clock: CaptureClock
    age_seconds: float
    """Between that answer and the copy."""
    exporter: str
    """Address of its exporter, without what it is reached with."""
    first_step: int
    last_step: int
    problem: str = ""


class CaptureExporter(_Part):
    """
    An exporter that was out of reach when the capture was made.
    """

    url: str
    error: str


class CaptureManifest(_Part):
    """
    The whole of `capture.json`.
    """

    format: Literal[1]
    deployment: str
    engine: str
    incident: str
    life: IncidentLife
    """Where the incident stood."""
    captured_unix: float
    """By the clock of the server."""
    sentence: str
    ranks: tuple[CaptureRank, ...]
    missing_ranks: int
    """Ranks of the engine of which no exporter spoke."""
    missing_exporters: tuple[CaptureExporter, ...]
    findings: tuple[dict[str, Any], ...]
    """What had been found, as the API gives it."""


def parse_manifest(raw: bytes) -> CaptureManifest:
    """
    The manifest in `raw`.

    Raises:
        CaptureError: it is none, or one of another version; or it names files that a capture cannot have.

    """
    if len(raw) > MAX_MANIFEST_BYTES:
        msg = f"{MANIFEST_NAME} is larger than {MAX_MANIFEST_BYTES} bytes"
        raise CaptureError(msg)
    try:
        manifest = CaptureManifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if where == "format" and first["type"] != "missing":
            msg = f"{MANIFEST_NAME} is of format {first['input']!r}, and this server reads format {FORMAT}: upgrade it"
        else:
            msg = f"{MANIFEST_NAME} is damaged: {where + ': ' if where else ''}{first['msg']}"
        raise CaptureError(msg) from error
    names = [rank.file for rank in manifest.ranks if rank.file]
    for name in names:
        if FILE_NAME.fullmatch(name) is None or names.count(name) > 1:
            msg = f"{MANIFEST_NAME} names a file that a capture cannot have: {name[:200]!r}"
            raise CaptureError(msg)
    return manifest


def file_name(key: str, taken: set[str]) -> str:
    """
    The name of a rank's file in a capture; `key` comes from an exporter, and need not be harmless.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", key)[:180].lstrip("._-") or "rank"
    names = (f"{stem}{f'.{number}' if number else ''}{SUFFIX}" for number in range(len(taken) + 1))
    return next(name for name in names if name not in taken)
