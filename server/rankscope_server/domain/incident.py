"""
An incident: findings of one cause, from the first to the last; the values that pages and API show.
"""

import enum
from dataclasses import dataclass

from rankscope_server.domain.model import Finding, FindingKind, Severity


class IncidentLife(str, enum.Enum):
    """
    Where an incident stands.
    """

    OPEN = "open"
    WORSENING = "worsening"
    """Something worse was found since it opened: output is wrong, ranks have parted."""
    WEDGED = "wedged"
    """No rank moves, or a rank is lost: the engine needs a restart."""
    RECOVERED = "recovered"
    """Nothing of it holds any more; it closes if that stays so."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class IncidentEvent:
    """
    One entry of an incident's timeline.
    """

    at_unix: float
    what: str
    """
    `found`, `over`, `worsening`, `wedged`, `recovered`, `closed`, `ended`, `captured`, `capture removed`, `fix on`,
    `fix off`, `left out`, or what whoever did something calls it.
    """
    sentence: str


@dataclass(frozen=True, slots=True)
class CaptureView:
    """
    A frozen copy of the flight records of an engine.
    """

    at_unix: float
    life: IncidentLife
    """Where the incident stood when it was made."""
    ranks: int
    first_step: int
    last_step: int
    size_bytes: int
    kept: bool = True
    """False once its records were removed to make room: what is said of it stays."""


@dataclass(frozen=True, slots=True)
class IncidentCard:
    """
    An incident in a list.
    """

    id: str
    deployment: str
    engine: str
    life: IncidentLife
    kind: FindingKind
    """The worst that was found."""
    severity: Severity
    sentence: str
    """What a tired person reads: what happened, at which step, to which requests."""
    step: int | None
    """First step of its first finding; None where it has none."""
    opened_unix: float
    changed_unix: float
    closed_unix: float | None


@dataclass(frozen=True, slots=True)
class IncidentView:
    """
    Everything that the page of an incident shows.
    """

    card: IncidentCard
    model: str
    vllm_version: str
    runner: str
    findings: tuple[Finding, ...]
    """All that were found, in the order in which they came to be; `open` as of now, or as it ended."""
    timeline: tuple[IncidentEvent, ...]
    """Oldest first."""
    captures: tuple[CaptureView, ...]
    """Oldest first."""
