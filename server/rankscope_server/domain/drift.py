"""
Drift that lasts: request-state lengths that stay above the scheduler's.

V1 ranks tell it step by step. On V2 the lengths on the host are copies of the scheduler's, which cannot drift: there it
shows in samples of the lengths on the device, taken every so many steps where that is turned on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import DeviceLengths, Lengths
from rankscope_server.domain.alignment import Aligned, tails
from rankscope_server.domain.assessed import Assessed, values_of
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, RankFacts, joined, reach_of
from rankscope_server.domain.model import Evidence, Finding, FindingKind, Severity
from rankscope_server.domain.requests import REQUESTS_NAMED, drifting_requests, first_request, short_request

_OUTPUT_TOKENS = int(Lengths.OUTPUT_TOKENS)  # members of an enumeration are slow to compare
_TOLD = ("drift_max", "drifting", "cached")


@dataclass(frozen=True, slots=True)
class Drifting:
    """
    A rank whose drift lasts, and the step at which that began.
    """

    row: int
    step: int
    since_unix: float


def lasting_drift(steps: npt.NDArray[np.unsignedinteger], reach: int) -> int | None:
    """
    Index of the first of the drifting `steps` that another one follows within `reach` steps; None if there is none.

    With pipeline parallelism the batches in flight take turns, so a request comes round every pp_size steps: two drifting
    steps in a row are two turns of the same batch, and the healthy batch between them says nothing. Below zero is
    legitimate (requests that the rank counts late) and never drift.
    """
    close = np.flatnonzero(np.diff(steps) <= reach)
    return int(close[0]) if close.size else None


def lasting_drifts(aligned: Aligned, ranks: Sequence[RankFacts], reach: int) -> list[Drifting]:
    """
    Ranks whose drift lasts within the steps of `aligned`.
    """
    above = aligned.records["drift_max"] > 0
    if not above.any():
        return []
    above &= aligned.measured
    found = []
    for row in np.flatnonzero(above.any(axis=1)).tolist():
        records = aligned.records[row][above[row]]
        index = lasting_drift(records["step"], reach)
        if index is not None:
            begin = ranks[row].clock.unix_of(int(records["begin_ns"][index]))
            found.append(Drifting(row, int(records["step"][index]), begin))
    return found


def device_drift(device: DeviceLengths) -> int:
    """
    Largest excess of a sample over what the scheduler allows, in tokens: above 0 is drift.
    """
    return max(device.total_excess, device.computed_excess)


def device_drifts(ranks: Sequence[RankFacts], now: Moment) -> list[Drifting]:
    """
    Ranks whose last sample of device-side lengths shows drift. One sample is enough: it was taken between two steps.
    """
    return [
        Drifting(row, rank.device.step, now.unix - (rank.device_age_seconds(now) or 0.0))
        for row, rank in enumerate(ranks)
        if rank.device is not None and device_drift(rank.device) > 0
    ]


@dataclass(frozen=True, slots=True)
class Latest:
    """
    Drift of a rank over its newest measured steps.
    """

    tokens: int
    """Largest drift; below zero is no drift."""
    requests: int
    """How many requests drift, at the step with the largest drift."""
    of: int
    """Cached requests of that step."""


def latest_drifts(ranks: Sequence[RankFacts], reach: int) -> tuple[list[Latest | None], list[bool]]:
    """
    Drift of each rank's newest measured steps, None where it is unknown; and whether it is over.

    The worst of as many steps as there are batches in flight, so that a healthy batch does not hide a drifting one; it is
    over once one step more shows none. On V2 those of the last sample of device-side lengths, however old that is.
    """
    records = tails([rank.history for rank in ranks], 4 * reach + 8)
    measured = records["lengths"] == _OUTPUT_TOKENS
    age = measured[:, ::-1].cumsum(axis=1)[:, ::-1]  # 1 for the newest that was measured
    drift = np.where(measured, records["drift_max"], np.iinfo(np.int32).min)
    ended = ~((age <= reach + 1) & (drift > 0)).any(axis=1)
    recent = measured & (age <= reach)
    recent[:, : -(reach + 4)] = False  # what is older says nothing about now
    worst = np.where(recent, drift, np.iinfo(np.int32).min).argmax(axis=1)
    rows = np.arange(len(ranks))
    told = zip(recent.any(axis=1).tolist(), *(records[name][rows, worst].tolist() for name in _TOLD), strict=True)
    latest: list[Latest | None] = [Latest(*values) if known else None for known, *values in told]
    over: list[bool] = ended.tolist()
    for row, rank in enumerate(ranks):
        if rank.is_v2:
            device = rank.device
            latest[row] = None if device is None else Latest(device_drift(device), device.excess_rows, device.rows)
            over[row] = device is None or device_drift(device) <= 0
    return latest, over


def latest_drift(rank: RankFacts, reach: int) -> Latest | None:
    """
    The same of one rank.
    """
    return latest_drifts([rank], reach)[0][0]


def assess_drift(
    engine: EngineFacts, group: Sequence[RankFacts], lasting: Iterable[Drifting], known: Finding | None, now: Moment
) -> Iterator[Assessed]:
    """
    Drift that lasts, or that was found and is not over. `lasting` are the ranks whose new steps show it.
    """
    found: dict[int, Drifting] = {}
    for one in (*lasting, *device_drifts(group, now)):
        found.setdefault(one.row, one)
    if not found and known is None:
        return
    if engine.idle or engine.ended:
        return  # no request is left that could drift
    reach = reach_of(group)
    drifted = frozenset(known.ranks if known is not None else ())
    latest, over = latest_drifts(group, reach)
    rows = [row for row, rank in enumerate(group) if (row in found or rank.id in drifted) and not over[row]]
    if not rows:
        return
    first = min((found[row] for row in rows if row in found), key=lambda one: one.step, default=None)
    step = (
        known.step
        if known is not None and known.step is not None
        else first.step
        if first is not None
        else group[rows[0]].history.last
    )
    since = first.since_unix if first is not None else now.unix
    ranks = tuple(group[row] for row in rows)
    began_with = (known.evidence.began_with if known is not None else "") or first_request(ranks, step)
    requests = tuple(dict.fromkeys(filter(None, (began_with, *drifting_requests(ranks, step)))))[:REQUESTS_NAMED]
    evidence = Evidence(values_of(ranks, (_excess(group[row], latest[row]) for row in rows)), requests, began_with)
    sentence = drift_sentence(group, rows, latest, step, began_with)
    yield Assessed(FindingKind.DRIFT, group[0].id.dp_rank, Severity.WARNING, sentence, step, ranks, since, evidence)


def _excess(rank: RankFacts, latest: Latest | None) -> str:
    """
    How much a rank counts too much: `+12 tokens in 3 requests`.
    """
    if latest is None or latest.tokens <= 0:
        return "agrees with the scheduler now"
    if rank.device is not None:
        return f"+{latest.tokens} tokens on the device in {latest.requests} of {latest.of} requests, at step {rank.device.step}"
    return f"+{latest.tokens} tokens in {latest.requests} requests"


def drift_sentence(
    ranks: Sequence[RankFacts], rows: Sequence[int], latest: Sequence[Latest | None], step: int, began_with: str = ""
) -> str:
    """
    Which ranks count too much, by how many tokens, and what the others say.
    """
    parts = []
    for row in rows:
        now, device = latest[row], ranks[row].device
        if now is None:
            continue
        if device is not None and now.tokens > 0:
            parts.append(
                f"{ranks[row].label} holds up to {now.tokens} tokens more on its device than the scheduler allows in {now.requests} of {now.of} requests, "
                f"as sampled at step {device.step}"
            )
            continue
        parts.append(
            f"{ranks[row].label} counts up to {now.tokens} tokens more than the scheduler in {now.requests} requests"
            if now.tokens > 0
            else f"{ranks[row].label} counted more tokens than the scheduler, and agrees with it now"
        )
    drifting = frozenset(rows)
    clean = [
        rank.label
        for row, rank in enumerate(ranks)
        if row not in drifting and (now := latest[row]) is not None and now.tokens <= 0
    ]
    others = f"; {joined(clean)} {'agree' if len(clean) > 1 else 'agrees'} with the scheduler" if clean else ""
    since = (
        f"; drift began at step {step} with request {short_request(began_with)}"
        if began_with
        else f", since step {step}"
    )
    return f"{joined(parts)}{since}{others}"
