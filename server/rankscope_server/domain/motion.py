"""
Ranks that do not move with a step in flight: wedged if they have parted, stalled if nothing says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from rankscope_exporter.contract import Guard, Phase, RankLife
from rankscope_server.domain.assessed import STICKY, Assessed, values_of
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, RankFacts, joined, seconds
from rankscope_server.domain.model import Evidence, Finding, FindingKind, Severity

WEDGE_SECONDS = 3.0
"""
Ranks that have parted and do not move for this long, or for ten usual steps, are wedged.
"""

STALL_SECONDS = 10.0
"""
Ranks that agree and do not move for this long, or for fifty usual steps, are stalled.
"""

STALL_CRITICAL = 6.0
"""
A stall of so many times its limit is critical.
"""

WARM_UP_STEPS, WARM_UP_SECONDS = 8, 90.0
"""
The first steps of an engine may compile: their limit is never below this.
"""

PACE_RANKS = 16
"""
Ranks that are asked how long a step usually takes, at most: all take the same ones.
"""

AGREED_STEPS = 64
"""
Steps without a mask disagreement after which one that was is no reason to hang any more.
"""

_PHASES: dict[int, str] = {
    Phase.SCHEDULED: "scheduled",
    Phase.STATE_UPDATED: "state updated",
    Phase.DECIDED: "decided",
}


def usual_step_seconds(rank: RankFacts) -> float:
    """
    Median duration of a rank's last steps; 0 where none is known.
    """
    records = rank.history.tail(64)
    done = records[records["phase"] == Phase.DONE]
    if len(done) == 0:
        return 0.0
    return float(np.median((done["end_ns"] - done["begin_ns"]).astype(np.int64))) / 1e9


def assess_motion(
    engine: EngineFacts,
    group: Sequence[RankFacts],
    parted: AbstractSet[FindingKind],
    known: Mapping[tuple[FindingKind, int], Finding],
    now: Moment,
) -> Iterator[Assessed]:
    """
    Whether the ranks of a group are stuck; `parted` are the disagreements that stand between them (`still_parted`),
    `known` the findings of the last look.
    """
    dp = group[0].id.dp_rank
    stuck = [rank for rank in group if rank.in_flight]
    held = (FindingKind.WEDGED, dp) in known
    if not stuck or (not held and any(rank.report.life is RankLife.STOPPED for rank in group)):
        return
    if not held and max(rank.quiet_seconds for rank in group) < WEDGE_SECONDS:
        return
    seen = _in_reach(engine, group, now)
    frozen = frozen_seconds(seen)
    stuck = [rank for rank in seen if rank.in_flight]
    if not stuck:
        return
    step = min(rank.history.last for rank in stuck)
    since = now.unix - frozen
    ended = any(rank.report.life is RankLife.GONE or rank.failure is not None for rank in group)
    if ended and not held and parted == {FindingKind.MASK_DISAGREEMENT}:
        return  # masks that differ hold up nobody yet; that a process is gone, or its step failed, does
    if parted:
        # A wedge that was seen before the last process ended is not undone by it.
        if (held and frozen > 1.0) or (frozen >= WEDGE_SECONDS and frozen >= _wedge_limit(seen, step, parted)):
            evidence = Evidence(values_of(group, map(_standing, group)), _requests(known, dp))
            sentence = _wedge_sentence(group, frozen)
            yield Assessed(FindingKind.WEDGED, dp, Severity.CRITICAL, sentence, step, tuple(stuck), since, evidence)
        return
    if ended:
        return  # that a process is gone, or its step failed, says it better
    if frozen < STALL_SECONDS:
        return
    limit = _limit(seen, step, STALL_SECONDS, 50)
    if frozen >= limit:
        severity = Severity.CRITICAL if frozen >= STALL_CRITICAL * limit else Severity.WARNING
        healed = any((kind, dp) in known for kind in STICKY)
        disagreement = "ranks that differed before agree since" if healed else "no disagreement is known"
        sentence = f"no rank has moved for {seconds(frozen)} with step {step} in flight on {joined(r.label for r in stuck)}; {disagreement}"
        evidence = Evidence(values_of(group, map(_standing, group)))
        yield Assessed(FindingKind.STALLED, dp, severity, sentence, step, tuple(stuck), since, evidence)


def still_parted(kinds: frozenset[FindingKind], last_mask: int, group: Sequence[RankFacts]) -> AbstractSet[FindingKind]:
    """
    Those of `kinds` because of which ranks may hang. Masks that have agreed for long since `last_mask`, the step at which
    they last differed, are no reason any more.
    """
    parted = kinds.intersection(STICKY)
    if parted == {FindingKind.MASK_DISAGREEMENT} and min(r.history.last for r in group) - last_mask >= AGREED_STEPS:
        return frozenset()
    return parted


def frozen_seconds(ranks: Sequence[RankFacts]) -> float:
    """
    For how long all ranks were seen to do nothing at the same time; they are not all looked at at the same moment.

    Told by their nodes' clocks alone: an exporter that is not reached makes no rank look frozen.
    """
    return min(rank.clock.received for rank in ranks) - max(rank.active_until for rank in ranks)


def _in_reach(engine: EngineFacts, group: Sequence[RankFacts], now: Moment) -> Sequence[RankFacts]:
    """
    The ranks whose exporters answer: as ranks move together, these show whether all do. All where none answers.
    """
    silent = {exporter.url for exporter in engine.exporters if exporter.out_of_reach(now)}
    return [rank for rank in group if rank.exporter not in silent] or group


def _wedge_limit(group: Sequence[RankFacts], step: int, parted: AbstractSet[FindingKind]) -> float:
    return WEDGE_SECONDS if FindingKind.GUARD_DISAGREEMENT in parted else _limit(group, step, WEDGE_SECONDS, 10)


def _limit(group: Sequence[RankFacts], step: int, least: float, steps: float) -> float:
    """
    Seconds that `step`, the earliest in flight, may take.
    """
    usual = max(usual_step_seconds(rank) for rank in group[:: -(-len(group) // PACE_RANKS)])
    return max(least, steps * min(usual, 6.0), WARM_UP_SECONDS if step <= WARM_UP_STEPS else 0.0)


def _requests(known: Mapping[tuple[FindingKind, int], Finding], dp: int) -> tuple[str, ...]:
    """
    The requests of the disagreement that a wedge goes back to.
    """
    findings = (known.get((kind, dp)) for kind in STICKY)
    return next((f.evidence.requests for f in findings if f is not None and f.evidence.requests), ())


def _standing(rank: RankFacts) -> str:
    """
    Where a rank stands: `in step 412, decided, for 14 s`.
    """
    head = rank.history.head
    if head is None:
        return "has begun no step"
    quiet = seconds(rank.quiet_seconds)
    if not rank.in_flight:
        return f"after step {head.step}, for {quiet}"
    return f"in step {head.step}, {_PHASES.get(head.phase, 'unknown')}, for {quiet}"


def _wedge_sentence(group: Sequence[RankFacts], frozen: float) -> str:
    senders: list[RankFacts] = []
    others: dict[str, list[str]] = {}
    for rank in group:
        if rank.phase is Phase.DECIDED and _newest_guard(rank) == Guard.BROADCAST:
            senders.append(rank)
        else:
            others.setdefault(f"{'in' if rank.in_flight else 'after'} step {rank.history.last}", []).append(rank.label)
    parts = []
    if senders:
        parts.append(
            f"{joined(r.label for r in senders)} posted the broadcast of step {senders[0].history.last} and never came back"
        )
    parts += [f"{joined(labels)} {'are' if len(labels) > 1 else 'is'} {where}" for where, labels in others.items()]
    return f"{'; '.join(parts)}: no rank has moved for {seconds(frozen)}, and none will until the engine is restarted"


def _newest_guard(rank: RankFacts) -> int:
    head = rank.history.head
    return head.guard if head is not None else int(Guard.NONE)
