"""
What a rank did last, in a sentence: what is left of it when it hangs or is gone.
"""

import numpy as np

from rankscope_exporter.contract import Guard, Phase, RankLife, Role
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import RankFacts, joined, seconds

LINGERS_SECONDS = 2.0
"""
A phase that lasts for longer is worth saying how long.
"""

_GUARDS = {Guard.NONE: "none", Guard.BROADCAST: "broadcast", Guard.SKIP: "skip"}


def guard_word(record: np.void | None) -> str:
    """
    `broadcast`, `skip`, `none` (no decision yet) or `missing` (no record).
    """
    if record is None or int(record["step"]) == 0:
        return "missing"
    return _GUARDS.get(Guard(int(record["guard"])) if int(record["guard"]) in (0, 1, 2) else Guard.NONE, "none")


def last_did(rank: RankFacts, peers: tuple[RankFacts, ...], now: Moment) -> str:
    """
    The last thing that `rank` did, with what it waits for where that is known.
    """
    newest = rank.history.newest()
    if newest is None:
        if rank.report.step:
            return f"is at step {rank.report.step}; no step record was read"
        return "has begun no step yet" if rank.report.life is not RankLife.GONE else "ended before its first step"
    age = rank.in_flight_seconds(now) or 0.0
    frozen = age > LINGERS_SECONDS
    sentence = _in_flight(rank, newest, peers, frozen=frozen) if int(newest["phase"]) < Phase.DONE else _done(newest)
    if rank.report.life is RankLife.GONE:
        return f"{sentence}; then its process ended"
    if rank.report.life is RankLife.STOPPED:
        return f"{sentence}; its process is stopped by a signal"
    if rank.report.life is RankLife.UNKNOWN:
        return f"{sentence}; whether its process lives is unknown"
    return f"{sentence} ({seconds(age)})" if frozen else sentence


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
