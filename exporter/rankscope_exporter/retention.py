"""
Which flight files have outlived their use: their process is gone, and nobody has asked for them for a while.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rankscope_exporter.flight import FlightError, FlightFile, list_flight_files
from rankscope_exporter.flight.writer import process_start_ticks


@dataclass(frozen=True, slots=True)
class FlightAge:
    """
    A flight file, whether its process is gone, and for how long nothing was written, in seconds.
    """

    path: Path
    gone: bool
    age_seconds: float


def plan_removals(files: Iterable[FlightAge], retention_seconds: float) -> list[Path]:
    """
    The files to remove: of a process that is gone, and older than the retention time.
    """
    return [file.path for file in files if file.gone and file.age_seconds > retention_seconds]


def remove_expired(directory: Path, retention_seconds: float, *, now: Callable[[], float] = time.time) -> list[Path]:
    """
    Remove the expired flight files of `directory`, and tell which; what cannot be removed stays.
    """
    ages = []
    for path in list_flight_files(directory):
        with contextlib.suppress(FlightError, OSError), FlightFile(path) as file:
            ages.append(FlightAge(path, is_gone(file.pid, file.process_start_ticks), now() - _last_written(file)))
    removed = []
    for path in plan_removals(ages, retention_seconds):
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


def is_gone(pid: int, start_ticks: int) -> bool:
    """
    Whether the process that started at `start_ticks` runs no more; its number may be another process's by now.
    """
    return process_start_ticks(pid) != start_ticks


def _last_written(file: FlightFile) -> float:
    """
    Wall-clock second of the last step, as far as the records tell; stores into a mapping do not touch the file's own time.
    """
    newest = file.records(after=max(file.step() - 1, 0))
    if not len(newest):
        return file.created_unix
    return file.created_unix + (int(newest[-1]["begin_ns"]) - file.created_monotonic_ns) / 1e9
