"""
Ranks of which some have the trim fix and some do not: their request states part.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rankscope_exporter.contract import ControlOutcome, MitigationState, Phase, RankLife
from rankscope_server.domain.alignment import align, newest_step
from rankscope_server.domain.assessed import Assessed, values_of
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import RankFacts, joined
from rankscope_server.domain.fix import acting_on
from rankscope_server.domain.model import Evidence, FindingKind, Severity

COMMON_STEPS = 32
"""
Newest steps among which one is looked for that all ranks have taken.
"""


def assess_mitigation(group: Sequence[RankFacts], now: Moment) -> Iterator[Assessed]:
    """
    Whether ranks differ about the trim fix, at the same step or for longer than a toggle takes.
    """
    if len({rank.trim for rank in group}) < 2 and not any(acting_on(rank) for rank in group):
        return
    live = [rank for rank in group if rank.report.life is not RankLife.GONE]
    on = [rank for rank in live if rank.trim is MitigationState.APPLIED]
    off = [rank for rank in live if rank.trim in (MitigationState.AVAILABLE, MitigationState.UNKNOWN_CODE)]
    acting = any(acting_on(rank) for rank in live)
    if (not on or not off) and not acting:
        return
    step: int | None = None
    common = _newest_common(group) if len(group) > 1 else None
    if common is not None:
        at, states = common
        if len(set(states)) > 1 and MitigationState.APPLIED in states:
            step = at
            on = [rank for rank, state in zip(group, states, strict=True) if state == MitigationState.APPLIED]
            off = [rank for rank in group if rank not in on]
    if not on or not off or (acting and step is None):
        return
    failed = [rank for rank in off if rank.report.control.outcome in (ControlOutcome.REFUSED, ControlOutcome.FAILED)]
    why = (
        f" ({joined(r.label for r in failed)} could not act: {failed[0].trim_reason or 'no reason given'})"
        if failed
        else ""
    )
    sentence = f"the trim fix is on at {joined(r.label for r in on)} and not at {joined(r.label for r in off)}{why}: turn it on or off again for all ranks"
    words = [*("applied" for _ in on), *(_without(rank) for rank in off)]
    evidence = Evidence(values_of([*on, *off], words))
    yield Assessed(
        FindingKind.MITIGATION_MIXED,
        group[0].id.dp_rank,
        Severity.CRITICAL,
        sentence,
        step,
        (*on, *off),
        now.unix,
        evidence,
    )


def _without(rank: RankFacts) -> str:
    reason = f": {rank.trim_reason}" if rank.trim_reason else ""
    return f"{rank.trim.label if rank.trim is not None else 'unknown'}{reason}"


def _newest_common(group: Sequence[RankFacts]) -> tuple[int, list[int]] | None:
    """
    The newest step that all ranks have taken, and where the fix stood on each; None where there is none.
    """
    histories = [rank.history for rank in group]
    last = newest_step(histories)
    aligned = align(histories, last - COMMON_STEPS, last)
    both = np.flatnonzero(aligned.reached(Phase.STATE_UPDATED).all(axis=0))
    if not both.size:
        return None
    return int(aligned.steps[both[-1]]), [int(state) for state in aligned.records["mitigation"][:, both[-1]]]
