"""
What a process holds: memory, descriptors, threads; and whether that grows.
"""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WORKER = b"VLLM::Worker"
"""
How the command lines of vLLM's ranks begin.
"""


@dataclass(frozen=True, slots=True)
class Vitals:
    """
    One process at one moment.
    """

    seconds: float
    """Monotonic clock."""
    memory_kib: int
    """Resident memory of its own (anonymous): mapped files and shared memory are not counted, nobody can leak those."""
    resident_kib: int
    descriptors: int
    threads: int


def read_vitals(pid: int, seconds: float, apart: Path) -> Vitals | None:
    """
    The vitals of a process; None if there is none of that id.

    Descriptors of files that are there in the directory `apart` are not counted; those of files that are not any more are.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        targets = [target for entry in Path(f"/proc/{pid}/fd").iterdir() if (target := _target(entry))]
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in fields:  # it is ending
        return None
    number = {name: int(fields[name].split()[0]) for name in ("RssAnon", "VmRSS", "Threads")}
    descriptors = sum(target.parent != apart or not target.exists() for target in targets)
    return Vitals(seconds, number["RssAnon"], number["VmRSS"], descriptors, number["Threads"])


def _target(descriptor: Path) -> Path | None:
    with contextlib.suppress(FileNotFoundError):  # closed since it was listed
        return descriptor.readlink()
    return None


def is_worker(pid: int) -> bool:
    """
    Whether the process is a rank of vLLM.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(WORKER)
    return False


@dataclass(frozen=True, slots=True)
class Growth:
    """
    By how much a process has grown after its warm-up.
    """

    seconds: float
    """Time observed after the warm-up."""
    memory_kib: int
    """Median of the last quarter less that of the first."""
    slope_kib_per_minute: float
    """Of the straight line that fits best."""
    descriptors: int
    threads: int
    last: Vitals


def assess_growth(samples: Sequence[Vitals], warm_up_seconds: float) -> Growth | None:
    """
    How a process has grown; None if it was not observed long enough to tell (8 samples after the warm-up).
    """
    start = samples[0].seconds if samples else 0.0
    settled = [sample for sample in samples if sample.seconds >= start + warm_up_seconds]
    if len(settled) < 8:
        return None
    quarter = len(settled) // 4
    early, late = settled[:quarter], settled[-quarter:]

    def grown(name: str) -> int:
        before, after = (statistics.median(getattr(sample, name) for sample in part) for part in (early, late))
        return int(after - before)

    times = [sample.seconds / 60 for sample in settled]
    slope = statistics.linear_regression(times, [sample.memory_kib for sample in settled]).slope
    return Growth(
        seconds=round(settled[-1].seconds - settled[0].seconds, 1),
        memory_kib=grown("memory_kib"),
        slope_kib_per_minute=round(slope, 1),
        descriptors=grown("descriptors"),
        threads=grown("threads"),
        last=settled[-1],
    )
