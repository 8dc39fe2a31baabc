"""
Ranks of which some have the trim fix and some do not: their request states part.
"""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from rankscope_exporter.contract import ControlOutcome, MitigationState, Phase, RankLife
from rankscope_server.domain.alignment import BLOCK_RECORDS, align, newest_step
from rankscope_server.domain.assessed import Assessed, values_of
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import RankFacts, joined
from rankscope_server.domain.fix import acting_on
from rankscope_server.domain.model import Evidence, Finding, FindingKind, Severity

_APPLIED, _NOT_APPLICABLE = int(MitigationState.APPLIED), int(MitigationState.NOT_APPLICABLE)

COMMON_STEPS = 32
"""
Newest steps among which one is looked for that all ranks have taken.
"""

SETTLE_SECONDS = 2.5
"""
For how long reports alone must show it: each exporter is asked once a second, and each at another moment.
"""


def assess_mitigation(
    group: Sequence[RankFacts], known: Finding | None, since: float, now: Moment
) -> Iterator[Assessed]:
    """
    Whether ranks differ about the trim fix: at the same step, which is proof, or, where no step tells, in what all of them
    have reported since the monotonic second `since` (see `reports_differ`).
    """
    if since == inf and not any(acting_on(rank) for rank in group):
        return
    found = _differing_step(group, first=known is None)
    if found is not None:
        step, on = found
        those = frozenset(on)
        off = [rank for rank in group if rank not in those]
    elif min(rank.reported for rank in group) - since >= SETTLE_SECONDS or (known is not None and since < inf):
        step, on, off = None, *_reported(group)
    else:
        return
    failed = [rank for rank in off if rank.report.control.outcome in (ControlOutcome.REFUSED, ControlOutcome.FAILED)]
    why = (
        f" ({joined(r.label for r in failed)} could not act: {failed[0].trim_reason or 'no reason given'})"
        if failed
        else ""
    )
    sentence = f"the trim fix is on at {joined(r.label for r in on)} and not at {joined(r.label for r in off)}{why}: turn it on or off again for all ranks"
    ranks = (*on, *off)
    evidence = Evidence(values_of(ranks, [*("applied" for _ in on), *map(_without, off)]))
    yield Assessed(
        FindingKind.MITIGATION_MIXED, group[0].id.dp_rank, Severity.CRITICAL, sentence, step, ranks, now.unix, evidence
    )


def reports_differ(group: Sequence[RankFacts]) -> bool:
    """
    Whether, by their reports, some ranks that live have the fix and some do not, with no toggle under way.
    """
    if len({rank.trim for rank in group}) < 2:
        return False
    on, off = _reported(group)
    return bool(on and off) and not any(acting_on(rank) for rank in group)


def _reported(group: Sequence[RankFacts]) -> tuple[list[RankFacts], list[RankFacts]]:
    """
    The living ranks that report the fix as on, and those that report that it could be and is not.
    """
    live = [rank for rank in group if rank.report.life is not RankLife.GONE]
    on = [rank for rank in live if rank.trim is MitigationState.APPLIED]
    return on, [rank for rank in live if rank.trim in (MitigationState.AVAILABLE, MitigationState.UNKNOWN_CODE)]


def _without(rank: RankFacts) -> str:
    reason = f": {rank.trim_reason}" if rank.trim_reason else ""
    return f"{rank.trim.label if rank.trim is not None else 'unknown'}{reason}"


def _differing_step(group: Sequence[RankFacts], *, first: bool) -> tuple[int, list[RankFacts]] | None:
    """
    The newest step that all ranks have taken and the ranks that had the fix there; None unless it tells them apart.

    With `first`, the step since which they differ, as far back as is quick to tell.
    """
    histories = [rank.history for rank in group]
    last = newest_step(histories)
    steps = max(COMMON_STEPS, BLOCK_RECORDS // len(group)) if first else COMMON_STEPS
    aligned = align(histories, last - min(steps, *(history.capacity for history in histories)) + 1, last)
    states = aligned.records["mitigation"]
    common = aligned.reached(Phase.STATE_UPDATED).all(axis=0)
    mixed = common & (states == _APPLIED).any(axis=0) & ((states != _APPLIED) & (states != _NOT_APPLICABLE)).any(axis=0)
    taken = np.flatnonzero(common)
    if len(group) < 2 or not taken.size or not mixed[taken[-1]]:
        return None
    equal = np.flatnonzero(~mixed[taken])
    since = taken[equal[-1] + 1] if equal.size else taken[0]
    return int(aligned.steps[since]), [group[row] for row in np.flatnonzero(states[:, taken[-1]] == _APPLIED).tolist()]
