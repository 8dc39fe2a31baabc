"""
What NCCL itself says of its communicators, as its RAS port told it to the exporter process.

NCCL names things its own way: its rank is the place inside a communicator, its host is an IP address. The pid is the one
that `rankscope_rank_info` has, so the two can be joined on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.labels import Labels
from rankscope_exporter.contract import metrics as m

EQUAL, MISMATCH, FROZEN_MISMATCH, INCOMPLETE, ERROR = "equal", "mismatch", "frozen mismatch", "incomplete", "error"
STATES = (EQUAL, MISMATCH, FROZEN_MISMATCH, INCOMPLETE, ERROR)
"""
States of a communicator, mildest first.
"""

MOST_REMEMBERED = 2048
"""
Ranks whose labels are kept from scrape to scrape: writing them costs more than all the rest.
"""


@dataclass(frozen=True, slots=True)
class NcclRank:
    """
    One rank of a communicator; what NCCL did not tell is None or empty.
    """

    rank: int
    """Its place inside the communicator."""
    host: str = ""
    """IP address of its node."""
    pid: int | None = None
    cuda_device: int | None = None
    state: str | None = None
    """init, running, finalize, abort; or, of a rank that is missing: unresponsive, dead, not a member."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Collectives launched so far, by type."""
    errors: tuple[tuple[str, str], ...] = ()
    """Kind (init, async) and result of each error."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """
    One communicator in one answer.
    """

    id: str
    """Its hash, 16 hexadecimal digits."""
    size: int
    """Ranks that it has, missing ones included."""
    status: str
    """What its most advanced rank does: init, running, finalize, abort, or not a member where none answers."""
    ranks: tuple[NcclRank, ...] = ()
    missing: int = 0
    """Ranks of which there is no data."""
    mismatch: bool = False
    """Its ranks differ in counts or in status."""
    incomplete: bool = False
    """Processes of its ranks do not answer."""
    error: bool = False
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Lowest and highest count among its ranks, by type of collective."""
    fingerprint: int | None = None
    """Equal as long as no rank's counts changed; None where counts are not told."""

    @property
    def errors(self) -> str:
        """Its troubles in NCCL's words: ok, or incomplete, error, mismatch separated by commas."""
        flags = (("incomplete", self.incomplete), ("error", self.error), ("mismatch", self.mismatch))
        return ",".join(name for name, on in flags if on) or "ok"


@dataclass(frozen=True, slots=True)
class SeenCommunicator:
    """
    A communicator with what only several answers tell.
    """

    communicator: Communicator
    state: str
    """One of `STATES`."""
    age_seconds: float
    """Time since the answer that it stands in."""
    unchanged_seconds: float | None
    """Time from the last change of its counts to that answer; None where counts are not told."""


@dataclass(frozen=True, slots=True)
class NcclView:
    """
    What is known through one RAS port.
    """

    address: str
    up: bool | None = None
    """Whether the last question was answered; None before the first."""
    answer_age_seconds: float | None = None
    """Time since the last answer that was understood; None before the first."""
    nccl_version: str = ""
    """Version of the NCCL whose answer is shown; empty if none is."""
    format: str = ""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Questions without an answer that was understood, by reason."""
    summary: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Number of communicators by status and errors."""
    communicators: tuple[SeenCommunicator, ...] = ()
    """Those that NCCL names; its text format names only those that are in trouble."""
    left_out: int = 0
    """Ranks that are not shown because there are too many."""


def assess_communicator(
    communicator: Communicator, unchanged_seconds: float | None, frozen_after_seconds: float
) -> str:
    """
    The worst that can be said of a communicator.

    Ranks are never in lockstep, so that counts which differ are news only if they stay: a mismatch whose counts did not
    change for `frozen_after_seconds` is frozen, one whose counts move is a slow rank at most.
    """
    if communicator.error:
        return ERROR
    if communicator.incomplete:
        return INCOMPLETE
    if not communicator.mismatch:
        return EQUAL
    frozen = unchanged_seconds is not None and unchanged_seconds >= frozen_after_seconds
    return FROZEN_MISMATCH if frozen else MISMATCH


def collect(views: Sequence[NcclView]) -> Iterable[Metric]:
    """
    The NCCL view of each RAS port.
    """
    out = Families()
    for view in views:
        _port(out, view)
        for seen in view.communicators:
            _communicator(out, view.address, seen)
    return out


def _port(out: Families, view: NcclView) -> None:
    address = view.address
    if view.up is not None:
        out.add_own(m.NCCL_RAS_UP, view.up, address=address)
    for reason, count in view.failures.items():
        out.add_own(m.NCCL_RAS_FAILURES, count, address=address, reason=reason)
    if view.answer_age_seconds is not None:
        out.add_own(m.NCCL_RAS_AGE, view.answer_age_seconds, address=address)
    if not view.nccl_version:
        return
    out.add_own(m.NCCL_INFO, 1, address=address, nccl_version=view.nccl_version, format=view.format)
    for (status, errors), count in view.summary.items():
        out.add_own(m.NCCL_COMMUNICATORS, count, address=address, status=status, errors=errors)
    out.add_own(m.NCCL_LEFT_OUT, view.left_out, address=address)


def _communicator(out: Families, address: str, seen: SeenCommunicator) -> None:
    communicator = seen.communicator
    labels = {"address": address, "communicator": communicator.id}
    for state in STATES:
        out.add_own(m.NCCL_COMMUNICATOR_STATE, state == seen.state, **labels, state=state)
    out.add_own(m.NCCL_COMMUNICATOR_AGE, seen.age_seconds, **labels)
    out.add_own(m.NCCL_COMMUNICATOR_RANKS, communicator.size, **labels)
    out.add_own(m.NCCL_COMMUNICATOR_MISSING, communicator.missing, **labels)
    if seen.unchanged_seconds is not None:
        out.add_own(m.NCCL_COMMUNICATOR_UNCHANGED, seen.unchanged_seconds, **labels)
    for collective, (lowest, highest) in communicator.ranges.items():
        out.add_own(m.NCCL_COUNT_SPREAD, highest - lowest, **labels, collective=collective)
    for rank in communicator.ranks:
        who = _rank_labels(address, communicator.id, rank.rank, rank.host, rank.pid, rank.cuda_device)
        for collective, count in rank.counts.items():
            out.add_labels(m.NCCL_COLLECTIVES, who.more(collective=collective), count)
        if rank.state is not None:
            out.add_labels(m.NCCL_RANK_STATE, who.more(state=rank.state), 1)
        for kind, result in rank.errors:
            out.add_labels(m.NCCL_RANK_ERROR, who.more(kind=kind, result=result), 1)


@lru_cache(maxsize=MOST_REMEMBERED)
def _rank_labels(
    address: str, communicator: str, rank: int, host: str, pid: int | None, cuda_device: int | None
) -> Labels:
    return Labels({
        "address": address, "communicator": communicator, "nccl_rank": str(rank), "host": host,
        "pid": _known(pid), "cuda_device": _known(cuda_device),
    })  # fmt: skip


def _known(number: int | None) -> str:
    return "" if number is None else str(number)
