"""
When the flight records of an engine are copied, and which copies must go.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankscope_server.domain.facts import seconds
from rankscope_server.domain.incident import IncidentLife
from rankscope_server.domain.incident_life import LEVELS, Incident

OPENED, WORSENED, WEDGED, ENDED = "opened", "worsened", "wedged", "ended"
"""
Reasons for a copy, each of which counts once: an incident has four at most.
"""


@dataclass(frozen=True, slots=True)
class KeptCapture:
    """
    A capture that is kept, without its bytes.
    """

    incident: str
    number: int
    at_unix: float
    size_bytes: int
    closed_unix: float | None
    """When its incident was closed; None while it is not."""


def plan_captures(incident: Incident, newest_step: int, *, ended: bool) -> tuple[str, ...]:
    """
    The reasons for which the records of an engine are to be copied now; one copy does for all of them.

    `ended` says that the engine has ended, at `newest_step`: what is held of it is forgotten some time later, so this is the
    last chance.
    """
    return tuple(r for r in _reasons(incident, newest_step, ended=ended) if r not in incident.capture_reasons)


def _reasons(incident: Incident, newest_step: int, *, ended: bool) -> Iterator[str]:
    yield OPENED
    joined = bool(incident.level) and incident.findings[0].kind not in LEVELS  # what it opened with was not the trouble
    if incident.life is IncidentLife.WORSENING or joined:
        yield WORSENED
    if incident.life is IncidentLife.WEDGED:
        yield WEDGED
    if ended and (not incident.captures or incident.captures[-1].last_step < newest_step):
        yield ENDED


def plan_removals(
    captures: Sequence[KeptCapture], *, now_unix: float, retention_seconds: float, most_bytes: int
) -> list[tuple[KeptCapture, str]]:
    """
    The captures to remove, each with the reason as a phrase.

    First those of incidents that were closed long ago; then, if all are too large together, the oldest ones.
    """
    removed: list[tuple[KeptCapture, str]] = []
    kept: list[KeptCapture] = []
    for capture in sorted(captures, key=lambda one: (one.at_unix, one.incident, one.number)):
        if capture.closed_unix is not None and now_unix - capture.closed_unix > retention_seconds:
            removed.append((capture, f"its incident was closed more than {seconds(retention_seconds)} ago"))
        else:
            kept.append(capture)
    spare = sum(capture.size_bytes for capture in kept) - most_bytes
    for capture in kept:
        if spare <= 0:
            break
        spare -= capture.size_bytes
        removed.append((capture, f"all captures together may take {most_bytes // 1_000_000} MB"))
    return removed
