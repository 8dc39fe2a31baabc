"""
What `/proc` tells of a rank's process.
"""

from pathlib import Path

from rankscope_exporter.contract.words import RankLife
from rankscope_exporter.namespaces import PROC

_STATE, _START = 0, 19
"""
Positions of process state and start time in `/proc/PID/stat`, counted after the command name.
"""


def life_of(stat: bytes | None, start_ticks: int) -> RankLife:
    """
    Life of the process whose `/proc/PID/stat` is `stat` (None: there is none), started at `start_ticks` after boot.

    Another process that got the same pid has another start time; `start_ticks` 0 means that it is not known.
    """
    if stat is None:
        return RankLife.GONE
    # The command name stands in parentheses and may hold anything, parentheses and spaces too.
    fields = stat[stat.rfind(b")") + 1 :].split()
    if len(fields) <= _START or (start_ticks and int(fields[_START]) != start_ticks):
        return RankLife.GONE
    state = fields[_STATE]
    if state in {b"Z", b"X", b"x"}:
        return RankLife.GONE
    return RankLife.STOPPED if state in {b"T", b"t"} else RankLife.RUNNING


def read_life(pid: int, start_ticks: int, proc: Path = PROC) -> RankLife:
    """
    Life of process `pid` as `/proc` has it now.
    """
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:  # noqa: PTH123  # once per rank and answer: Path costs twice as much
            stat: bytes | None = file.read()
    except OSError:
        stat = None
    return life_of(stat, start_ticks)
