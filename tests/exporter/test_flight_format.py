"""
docs/flight-format.md says what the code does: offsets, sizes, types, enumerations, and the reader without the library.
"""

import enum
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rankscope_exporter.contract import Guard, Phase, words
from rankscope_exporter.flight import FlightFile, layout, reader, source
from rankscope_exporter.flight.copying import ATTEMPTS
from rankscope_exporter.recorder.base import SAMPLE_STEPS
from rankscope_exporter.settings import WorkerSettings

Make = Callable[..., Any]
PAGE = (Path(__file__).parents[2] / "docs" / "flight-format.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[1]


def rows(title: str) -> list[list[str]]:
    """The cells of the table in a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def fields(title: str) -> list[tuple[int, str, str]]:
    """Offset, type and name of the fields in a section."""
    return [(int(row[0]), row[1], row[2].strip("`")) for row in rows(title)]


def type_name(kind: np.dtype) -> str:
    """A type as the page writes it."""
    base, shape = kind.subdtype or (kind, ())
    name = f"{base.kind}{base.itemsize * 8}"
    return f"{shape[0]} x {name}" if shape else name


def described(kind: np.dtype, start: int = 0) -> list[tuple[int, str, str]]:
    """Offset, type and name of the fields of a NumPy type."""
    return [(start + offset, type_name(field), name) for name, (field, offset) in kind.fields.items()]


def test_areas() -> None:
    """Every area is there with its place and size, in order, none over another."""
    places = {
        "header": (0, layout.HEADER_BYTES),
        "identity": (layout.IDENTITY_OFFSET, layout.IDENTITY_BYTES),
        "report": (layout.HOOKS_OFFSET, layout.HOOKS_BYTES),
        "control": (layout.CONTROL_OFFSET, layout.CONTROL_BYTES),
        "live words": (layout.LIVE_OFFSET, layout.LIVE_BYTES),
        "lengths": (layout.HISTOGRAM_OFFSET, layout.HISTOGRAM_BYTES),
        "own time": (layout.OWN_OFFSET, layout.OWN_BYTES),
        "device lengths": (layout.DEVICE_OFFSET, layout.DEVICE_BYTES),
        "request table": (layout.TABLE_OFFSET, layout.TABLE_BYTES),
        "ring": (layout.RING_OFFSET, layout.STEP_DTYPE.itemsize),
    }
    told = {name: (int(offset), int(size.split()[0])) for offset, size, name, _ in rows("Areas")}

    assert told == places
    ends = [offset + size for offset, size in told.values()]
    assert all(end <= begin for end, (begin, _) in zip(ends, list(told.values())[1:], strict=False))


def test_header() -> None:
    """The header's fields are those of the layout, as the writer fills them."""
    names = ["magic", "version", "record_bytes", "ring_capacity", "entry_bytes", "table_capacity", "buckets", "pid", "reserved", "process_start", "wall", "monotonic", "file_bytes"]  # fmt: skip
    types = {"8s": "8 bytes", "I": "u32", "Q": "u64", "q": "i64"}
    codes = re.findall(r"8s|[IQq]", layout.HEADER.format)
    expected, offset = [], 0
    for name, code in zip(names, codes, strict=True):
        expected.append((offset, types[code], name))
        offset += {"8s": 8, "I": 4}.get(code, 8)

    assert fields("Header") == expected
    told = {row[2].strip("`"): row[4] for row in rows("Header")}
    assert told["magic"] == f"`{layout.MAGIC.decode()}`"
    assert told["version"] == str(layout.VERSION)
    assert told["record_bytes"] == str(layout.STEP_DTYPE.itemsize)
    assert told["entry_bytes"].startswith(f"{layout.REQUEST_DTYPE.itemsize},")
    assert told["table_capacity"] == str(layout.TABLE_CAPACITY)
    assert told["buckets"].startswith(f"{layout.BUCKETS},")


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Step records", described(layout.STEP_DTYPE)),
        ("Request table", described(layout.REQUEST_DTYPE)),
        ("Device lengths", described(layout.DEVICE_DTYPE, layout.DEVICE_OFFSET)),
        (
            "Lengths and own time",
            described(layout.HISTOGRAM_DTYPE, layout.HISTOGRAM_OFFSET) + described(layout.OWN_DTYPE, layout.OWN_OFFSET),
        ),
    ],
)
def test_fields(title: str, expected: list[tuple[int, str, str]]) -> None:
    """Every field stands there with its offset and type, in order."""
    assert fields(title) == expected
    assert all(row[-1] for row in rows(title))


def test_parts_of_a_record() -> None:
    """Each field of a record is in the part that the page names."""
    ends = {
        "begun": layout.PART_STATE_OFFSET,
        "state": layout.PART_DECIDED_OFFSET,
        "decided": layout.PART_DONE_OFFSET,
        "done": layout.FAILED_OFFSET,
    }
    for row in rows("Step records"):
        part = next((part for part, end in ends.items() if int(row[0]) < end), "")
        assert row[4] == part, row


@pytest.mark.parametrize(
    ("title", "start", "prefixes"),
    [("Control", layout.CONTROL_OFFSET, ("CONTROL_REQUEST", "ACK_")), ("Live words", layout.LIVE_OFFSET, ("LIVE_",))],
)
def test_words(title: str, start: int, prefixes: tuple[str, ...]) -> None:
    """Every word of control and live area stands there with index and offset."""
    told = {row[2].strip("`"): (int(row[0]), int(row[1])) for row in rows(title)}
    known = {n: v for n, v in vars(layout).items() if n.startswith(prefixes) and not n.endswith(("_OFFSET", "_BYTES"))}

    assert told == {name: (index, start + 8 * index) for name, index in known.items()}


def test_enumerations() -> None:
    """Every enumeration that a file holds numbers of is there, with all of them."""
    told = {row[0].strip("`"): row[1] for row in rows("Enumerations")}
    kinds = {
        n: k
        for n, k in vars(words).items()
        if isinstance(k, type) and issubclass(k, enum.IntEnum) and k is not enum.IntEnum
    }

    assert told == {
        name: ", ".join(f"{m.value} {m.name.lower().replace('_', ' ')}" for m in kind) for name, kind in kinds.items()
    }


def test_numbers_in_the_text() -> None:
    """Sizes, limits and intervals that sentences name are those of the code."""
    text = " ".join(PAGE.split())
    assert f"{layout.file_bytes(layout.RING_CAPACITY)} with the default of {layout.RING_CAPACITY} steps" in text
    assert f"from 64 to {reader.MAX_RING_CAPACITY}" in text
    for allowed in (64, reader.MAX_RING_CAPACITY):
        WorkerSettings(ring_steps=allowed)
    for refused in (63, reader.MAX_RING_CAPACITY + 1):
        with pytest.raises(ValidationError):
            WorkerSettings(ring_steps=refused)
    assert f"more than {reader.MAX_RING_CAPACITY} steps is refused" in text
    assert f"| lengths | every {SAMPLE_STEPS} steps |" in text
    assert f"| own time | every {layout.OWN_TIME_STEPS} steps |" in text
    assert ATTEMPTS == 4
    assert "up to four attempts" in text
    assert f"Head at {layout.TABLE_OFFSET}:" in text
    assert f"from {layout.TABLE_OFFSET + layout.TABLE_HEAD_BYTES} on" in text
    assert f"-{-layout.MARGIN_UNKNOWN}: unknown" in text
    assert f"4 ... {int(layout.BUCKET_BOUNDS[-2])} tokens" in text
    assert f"4 ... {int(layout.OWN_BOUNDS[-2] * 1e6)} µs" in text
    assert layout.BLOB_HEAD.format == "<QI"
    assert layout.TABLE_HEAD.format == "<QII"
    assert not layout.CONTROL_OFFSET % 4096, "the store of the control word maps its page alone"
    assert source.__doc__


def test_the_control_word() -> None:
    """The bits of a control word are where the page says."""
    assert layout.encode_control(1, 1, 1, desired=True) == 1 | 1 << 1 | 1 << 4 | 1 << 24
    assert (
        "desired state (bit 0), `Mitigation` (bits 1 to 3), generation (bits 4 to 23) and effective step (bits 24 to 63"
        in " ".join(PAGE.split())
    )
    assert layout.MAX_GENERATION.bit_length() == 20
    assert layout.MAX_EFFECTIVE_STEP.bit_length() == 40


def test_reading_without_the_library(rank_file: Make, tmp_path: Path) -> None:
    """The program on the page runs, has about 20 lines, and says what the library says; other files it refuses."""
    program = re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[1]
    rank = rank_file(0)
    for step in range(1, 70):
        rank.step(step, drift_max=-step, guard=Guard.SKIP if step % 2 else Guard.BROADCAST)
    rank.step(70, lengths=0, guard=Guard.NONE)
    rank.step(71, Phase.STATE_UPDATED, drift_max=5)
    rank.step(72, Phase.SCHEDULED)
    rank.writer.memory[layout.RING_OFFSET + 65 % 64 * layout.STEP_DTYPE.itemsize + layout.PHASE_OFFSET] = 0

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False, timeout=200
        )

    expected = []
    with FlightFile(rank.path) as flight:
        for record in flight.records():
            phase = Phase(int(record["phase"]))
            drift = record["drift_max"] if phase >= Phase.STATE_UPDATED and record["lengths"] else "-"
            guard = Guard(int(record["guard"])).name.lower() if record["guard"] else "-"
            expected.append(f"{record['step']} {phase.name.lower()} {guard} {drift}")
    done = run(rank.path)
    noise = tmp_path / "noise"
    noise.write_bytes(bytes(30000))

    assert done.stderr == ""
    assert done.stdout.splitlines() == expected
    assert len(expected) == 63
    assert len([line for line in program.splitlines() if line]) <= 21
    assert "not a flight file of version 2" in run(noise).stderr
