"""
How far a replay goes, where somebody says so: a moment, or a time after the last record.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from rankscope_server.replay.engines import SavedEngine
from rankscope_server.replay.errors import ReplayError

_AFTER = re.compile(r"\+(\d+(?:\.\d+)?)s?")
_UNIX = re.compile(r"\d{9,11}(?:\.\d+)?")


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
        records = rank.saved.records[-1:]
        times = [int(records[name][0]) for name in ("begin_ns", "decide_ns", "end_ns")] if len(records) else [0]
        ends.append(rank.unix_ns(max(*times, rank.saved.created_ns)))
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
    except ValueError as error:
        msg = f"--until {text}: not a time; write 2026-12-01T14:03:00Z, seconds since 1970, or +30 for 30 s after the last record"
        raise ReplayError(msg) from error
    return Until(unix=(moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp())
