"""
Cases of ranks that are lost, of a fix that only some ranks have, and of what is not seen.
"""

from case_engine import Shape
from made_case import V1_HOOKS, Case, Made, Verdict, gone, ran

from rankscope_exporter.contract import MitigationState, Phase, RankLife
from rankscope_server.domain.model import FindingKind

LOST, MIXED, BLIND = FindingKind.RANK_LOST, FindingKind.MITIGATION_MIXED, FindingKind.BLIND


def process_that_is_gone() -> Made:
    """The first rank's process ends within a step, and its peer waits for it."""
    shape = Shape(seed=70, arrivals=0.3, fix=True)
    _, (first, last) = ran(80, shape)
    first.hang(71, Phase.STATE_UPDATED)
    gone(first)
    last.hang(71, Phase.SCHEDULED)
    return Made(shape, [first, last], (Verdict(LOST, 71, ("pp0",)),))


def process_that_is_stopped() -> Made:
    """The second rank's process is stopped by a signal; the first goes on until it has to wait."""
    shape = Shape(seed=71, arrivals=0.3, fix=True)
    _, (first, last) = ran(80, shape)
    last.hang(64, Phase.STATE_UPDATED)
    last.life = RankLife.STOPPED
    first.hang(66, Phase.DECIDED)
    return Made(shape, [first, last], (Verdict(LOST, 64, ("pp1",)),))


def fix_on_some_ranks() -> Made:
    """From some step on the trim fix is on at the first of two ranks only."""
    shape = Shape(seed=72, draft_tokens=1, arrivals=0.3, fix=True)
    _, (first, last) = ran(80, shape)
    last.records["mitigation"] = MitigationState.AVAILABLE
    last.trim = MitigationState.AVAILABLE
    first.records["mitigation"][:49] = MitigationState.AVAILABLE
    return Made(shape, [first, last], (Verdict(MIXED, None, ("pp0", "pp1")),), waited_seconds=0.5)


def hook_that_is_off() -> Made:
    """The hook that reads lengths did not find its code, and took no part."""
    shape = Shape(seed=73, arrivals=0.3, fix=True)
    _, tapes = ran(80, shape)
    for tape in tapes:
        tape.hooks = [
            {"hook": hook, "state": "off" if hook == "_update_states" else "on", "reason": "probe failed"}
            for hook in V1_HOOKS
        ]
        for name in ("lengths", "state_sum", "scheduler_sum", "state_max", "scheduler_max", "drift_max", "drift_sum"):
            tape.records[name] = 0
    return Made(shape, tapes, (Verdict(BLIND, None, ("pp0", "pp1")),), waited_seconds=0.5)


def code_that_is_unknown() -> Made:
    """The loaded code is not what the trim fix knows."""
    shape = Shape(seed=74, arrivals=0.3, fix=True)
    _, tapes = ran(80, shape)
    for tape in tapes:
        tape.trim, tape.trim_reason = MitigationState.UNKNOWN_CODE, "two gated trims"
        tape.records["mitigation"] = MitigationState.UNKNOWN_CODE
    return Made(shape, tapes, (Verdict(BLIND, None, ("pp0", "pp1")),), waited_seconds=0.5)


CASES = (
    Case("process-that-is-gone", "A rank's process ends while its peer waits.", (), process_that_is_gone),
    Case("process-that-is-stopped", "A rank's process is stopped by a signal.", (), process_that_is_stopped),
    Case("fix-on-some-ranks", "Some ranks have the trim fix, and some do not.", (), fix_on_some_ranks),
    Case("hook-that-is-off", "What should be read of the ranks is not.", (), hook_that_is_off),
    Case("code-that-is-unknown", "Ranks run code that is not known here.", (), code_that_is_unknown),
)
