"""
What a rank did last, in a sentence: what is left of it when it hangs or is gone.
"""

import numpy as np

from rankscope_exporter.contract import Guard, Phase, RankLife, Role, StepFailure
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import RankFacts, joined, seconds

LINGERS_SECONDS = 2.0
"""
A phase that lasts for longer is worth saying how long.
"""

_UNTOLD = ("", "unknown")
"""
What a rank says of a failure whose method and kind it did not write down.
"""

_GUARDS = {Guard.NONE: "none", Guard.BROADCAST: "broadcast", Guard.SKIP: "skip"}


def guard_word(record: np.void | None) -> str:
    """
    `broadcast`, `skip`, `none` (no decision yet) or `missing` (no record).
    """
    if record is None or int(record["step"]) == 0:
        return "missing"
    return _GUARDS.get(Guard(int(record["guard"])) if int(record["guard"]) in (0, 1, 2) else Guard.NONE, "none")


_NEVER_LEFT: dict[int, str] = {
    Phase.SCHEDULED: "before the state was updated",
    Phase.STATE_UPDATED: "after the state was updated",
    Phase.DECIDED: "after the guard had decided",
}


def failed_in(failure: StepFailure) -> str:
    """
    How a step ended in an error of vLLM: `failed in step 34, in sample_tokens after the state was updated: AssertionError`.
    """
    method = "" if failure.method in _UNTOLD else f"in {failure.method}"
    place = " ".join(filter(None, (method, _NEVER_LEFT.get(failure.phase, ""))))
    kind = "" if failure.kind in _UNTOLD else f": {failure.kind}"
    return f"failed in step {failure.step}{', ' if place else ''}{place}{kind}"


def last_did(rank: RankFacts, peers: tuple[RankFacts, ...], now: Moment) -> str:
    """
    The last thing that `rank` did, with what it waits for where that is known.
    """
    failure, newest = rank.failure, rank.history.newest()
    if failure is not None:
        return f"{failed_in(failure)}{_fate(rank)}"
    if newest is None:
        if rank.report.step:
            return f"is at step {rank.report.step}; no step record was read"
        return "has begun no step yet" if rank.report.life is not RankLife.GONE else "ended before its first step"
    age = rank.in_flight_seconds(now) or 0.0
    frozen = age > LINGERS_SECONDS
    sentence = _in_flight(rank, newest, peers, frozen=frozen) if int(newest["phase"]) < Phase.DONE else _done(newest)
    if rank.report.life is not RankLife.RUNNING:
        return f"{sentence}{_fate(rank)}"
    return f"{sentence} ({seconds(age)})" if frozen else sentence


def _fate(rank: RankFacts) -> str:
    """
    What became of its process since; empty while that runs.
    """
    return {
        RankLife.GONE: "; then its process ended",
        RankLife.STOPPED: "; its process is stopped by a signal",
        RankLife.UNKNOWN: "; whether its process lives is unknown",
    }.get(rank.report.life, "")


def _in_flight(rank: RankFacts, newest: np.void, peers: tuple[RankFacts, ...], *, frozen: bool) -> str:
    step = int(newest["step"])
    phase = Phase(int(newest["phase"]))
    if phase is Phase.DECIDED:
        if int(newest["guard"]) == Guard.BROADCAST:
            if int(newest["role"]) == Role.RECEIVER:
                return f"waits for the broadcast of step {step}"
            behind = [
                peer
                for peer in peers
                if peer is not rank and peer.id.tp_rank == rank.id.tp_rank and not _took_part(peer, step)
            ]
            waiting = f": waiting for {joined(peer.label for peer in behind)}" if behind else ""
            return (
                f"broadcast posted at step {step} and never left{waiting}"
                if frozen
                else f"posts the broadcast of step {step}"
            )
        if int(newest["guard"]) == Guard.SKIP:
            return f"skipped the collective at step {step}{_why_skipped(newest)} and has not left the step"
    doing = "entered" if phase is Phase.SCHEDULED else "updated its requests in"
    then = "" if frozen or phase is Phase.SCHEDULED else ", no decision yet"
    before = _before(rank, step)
    if before:
        return f"{before}, then began step {step}{' and never left it' if frozen else ''}"
    return f"{doing} step {step}{then}{' and never left it' if frozen else ''}"


def _before(rank: RankFacts, step: int) -> str:
    records = rank.history.take(np.array([max(step - 1, 1)], dtype=np.uint64))
    record = records[0]
    if step > 1 and int(record["step"]) and int(record["guard"]) == Guard.SKIP:
        return f"skipped the collective at step {step - 1}{_why_skipped(record)}"
    return ""


def _took_part(peer: RankFacts, step: int) -> bool:
    record = peer.history.take(np.array([step], dtype=np.uint64))[0]
    return int(record["step"]) != 0 and int(record["guard"]) == Guard.BROADCAST


def _done(record: np.void) -> str:
    step = int(record["step"])
    if int(record["guard"]) == Guard.SKIP:
        return f"skipped the collective at step {step}{_why_skipped(record)}, step done"
    if int(record["guard"]) == Guard.BROADCAST:
        verb = "took" if int(record["role"]) == Role.RECEIVER else "sent"
        return f"{verb} the broadcast of step {step}, step done"
    return f"finished step {step}"


def _why_skipped(record: np.void) -> str:
    requests, masked = int(record["requests"]), int(record["masked"])
    if not int(record["mask_known"]) or requests == 0:
        return ""
    if masked == requests:
        return f" (all {requests} requests masked)" if requests > 1 else " (its only request masked)"
    return f" ({masked} of {requests} requests masked)"
