"""
When a copy was made, and whether the process lived: what decides whether a last step hung, or was just under way.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rankscope_exporter.contract import RankLife
from rankscope_server.domain.clock import NodeClock
from rankscope_server.replay.saved import SavedRank

PROC = Path("/proc")

_STAMP = re.compile(r"\.(\d{8}T\d{6}Z)(?:-\d+)?\.flight$")
"""
What `rankscope-exporter copy` puts into the name of a copy.
"""

_STATE, _START = 0, 19
"""
Positions in `/proc/PID/stat`, counted after the command name.
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """
    The moment up to which a saved file speaks.
    """

    ns: int | None = None
    """By the monotonic clock of its node; None where it is not known."""
    life: RankLife | None = None
    """What was known of the process then; None where nothing was."""
    age_seconds: float = 0.0
    """How much later the copy was made: nothing had been heard of the rank since."""


def taken_by_capture(rank: SavedRank) -> Taken | None:
    """
    What the capture of an incident says that a file is part of; None if it is part of none.
    """
    capture = rank.file.capture
    told = None if capture is None else next((one for one in capture.ranks if one.file == rank.file.name), None)
    return None if told is None else Taken(told.clock.monotonic_ns, told.life, told.age_seconds)


def taken_by_name(rank: SavedRank) -> Taken | None:
    """
    When the name of a copy says that it was made; None if it says nothing.
    """
    found = _STAMP.search(rank.file.name)
    if found is None:
        return None
    try:
        moment = datetime.strptime(found[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:  # digits that are no date
        return None
    return Taken(node_ns(rank, moment.timestamp()))


def taken_live(rank: SavedRank, clock: NodeClock, proc: Path = PROC) -> Taken | None:
    """
    The moment of `clock`, read after the file was, if a process of this machine is writing this very file; None if none is.
    """
    life = read_life(rank, proc)
    return None if life is None else Taken(clock.monotonic_ns, life)


def read_life(rank: SavedRank, proc: Path = PROC) -> RankLife | None:
    """
    Life of the process that has this very file mapped; None if none has, or if that cannot be seen.

    The same process id and start prove nothing alone: a copy has them too, and stands still while its process goes on.
    """
    try:
        stat = (proc / str(rank.pid) / "stat").read_bytes()
        maps = (proc / str(rank.pid) / "maps").read_text(encoding="utf-8", errors="replace")
        inode = str(rank.file.path.stat().st_ino)
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 1 :].split()
    if len(fields) <= _START or int(fields[_START]) != rank.process_start_ticks:
        return None
    mapped = (line.split(maxsplit=5) for line in maps.splitlines())
    if not any(len(m) == 6 and m[4] == inode and m[5].endswith(rank.file.path.name) for m in mapped):
        return None
    return RankLife.STOPPED if fields[_STATE] in (b"T", b"t") else RankLife.RUNNING


def node_ns(rank: SavedRank, unix: float) -> int:
    """
    A wall-clock second as nanoseconds of the monotonic clock of a rank's node.
    """
    return rank.created_ns + round((unix - rank.created_unix) * 1e9)
