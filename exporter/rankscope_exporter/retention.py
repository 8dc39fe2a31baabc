"""
Which flight files have outlived their use: their process is gone, and nothing was written into them for a while.

Of a process in another process namespace nobody here can tell whether it is gone. It may be idle for hours, and without
its file it is blind, so that its file stays much longer.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rankscope_exporter.flight import FlightError, FlightFile, list_flight_files
from rankscope_exporter.flight.writer import process_start_ticks
from rankscope_exporter.namespaces import is_foreign, read_pid_namespace

FOREIGN_SECONDS = 86400.0
"""
How long the file of a process in another namespace is kept at least, after its last step.
"""


@dataclass(frozen=True, slots=True)
class FlightAge:
    """
    A flight file, whether its process is gone, and for how long nothing was written, in seconds.
    """

    path: Path
    gone: bool
    """Also where the process cannot be seen from here."""
    age_seconds: float
    foreign: bool = False
    """Whether the process lives, or lived, in another process namespace."""


def plan_removals(files: Iterable[FlightAge], retention_seconds: float) -> list[Path]:
    """
    The files to remove: of a process that is gone, and older than the retention time; if that is not known, than a day at least.
    """
    longest = max(retention_seconds, FOREIGN_SECONDS)
    return [
        file.path for file in files if file.gone and file.age_seconds > (longest if file.foreign else retention_seconds)
    ]


def remove_expired(directory: Path, retention_seconds: float, *, now: Callable[[], float] = time.time) -> list[Path]:
    """
    Remove the expired flight files of `directory`, and tell which; what cannot be removed stays.
    """
    ages = []
    own = read_pid_namespace()
    for path in list_flight_files(directory):
        with contextlib.suppress(FlightError, OSError), FlightFile(path) as file:
            foreign = is_foreign(file.identity().get("pid_namespace"), own)
            gone = foreign or is_gone(file.pid, file.process_start_ticks)
            ages.append(FlightAge(path, gone, now() - _last_written(file), foreign))
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
    begun = file.wall_time(int(newest[-1]["begin_ns"])) if len(newest) else None
    return file.created_unix if begun is None else begun
