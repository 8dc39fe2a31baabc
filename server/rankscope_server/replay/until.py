"""
How far a replay goes, where somebody says so: a moment, or a time after the last record.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from rankscope_server.replay.engines import SavedEngine
from rankscope_server.replay.errors import ReplayError
from rankscope_server.replay.saved import MAX_UNIX
from rankscope_server.replay.timeline import Timeline

_AFTER = re.compile(r"\+(\d{1,9}(?:\.\d+)?)s?")
_UNIX = re.compile(r"\d{9,10}(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Until:
    """
    The end of a replay: a wall-clock second, or seconds after the last thing that an engine did.
    """

    unix: float | None = None
    after_seconds: float = 0.0

    def of(self, engine: SavedEngine) -> float:
        """
        The end for one engine, as a wall-clock second.
        """
        return self.unix if self.unix is not None else last_unix(engine) + self.after_seconds


def last_unix(engine: SavedEngine) -> float:
    """
    When an engine did the last thing that is known of it.
    """
    ends = []
    for rank in engine.ranks:
        last = Timeline(rank.saved.records, rank.saved.created_ns).last_ns
        ends.append(rank.unix_ns(rank.saved.created_ns if last is None else last))
    return max(ends) / 1e9


def parse_until(text: str) -> Until:
    """
    The end of a replay out of what somebody wrote: `2026-12-01T14:03:00Z`, `1780000000`, or `+30` for thirty seconds after
    the last record. A time without a zone is UTC.

    Raises:
        ReplayError: it is none of these.

    """
    if (after := _AFTER.fullmatch(text)) is not None:
        return Until(after_seconds=float(after[1]))
    if _UNIX.fullmatch(text):
        return Until(unix=float(text))
    try:
        moment = datetime.fromisoformat(text)
        unix = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        unix = -1.0
    if not 0 < unix < MAX_UNIX:
        msg = f"--until {text}: not a time; write 2026-12-01T14:03:00Z, seconds since 1970, or +30 for 30 s after the last record"
        raise ReplayError(msg)
    return Until(unix=unix)
