"""
The one word and the one sentence for an engine.
"""

import re

from rankscope_exporter.contract import MitigationState
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.drift import latest_drift
from rankscope_server.domain.facts import EngineFacts, joined, seconds
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.model import Finding, FindingKind, State

_STATES = {
    FindingKind.DRIFT: State.DRIFTING,
    FindingKind.MASK_DISAGREEMENT: State.OUTPUT_WRONG,
    FindingKind.GUARD_DISAGREEMENT: State.PARTED,
    FindingKind.WIDTH_MISMATCH: State.PARTED,
    FindingKind.BATCH_MISMATCH: State.PARTED,
    FindingKind.WEDGED: State.WEDGED,
    FindingKind.STALLED: State.STALLED,
    FindingKind.RANK_LOST: State.RANK_LOST,
    FindingKind.MITIGATION_MIXED: State.MITIGATION_MIXED,
    FindingKind.BLIND: State.BLIND,
}

HEALED_STEPS = 64
"""
Steps without a mask disagreement, with the trim fix on at every rank, after which an engine counts as healthy again.
"""


def healed(engine: EngineFacts, memory: EngineMemory, finding: Finding) -> bool:
    """
    Whether a mask disagreement is history: the fix is on at every rank and masks have agreed for a while since.

    The finding stays open (tokens were wrong), but it is no longer what the engine is like now.
    """
    if finding.kind is not FindingKind.MASK_DISAGREEMENT or not all(
        rank.trim is MitigationState.APPLIED for rank in engine.ranks
    ):
        return False
    last = max(
        (step for (kind, _), step in memory.last_differing.items() if kind is finding.kind), default=finding.step or 0
    )
    agreed = min(rank.history.last for rank in engine.ranks) - last
    return agreed >= HEALED_STEPS or (engine.idle and agreed > 0)


def current_findings(engine: EngineFacts, memory: EngineMemory) -> tuple[Finding, ...]:
    """
    Open findings that say what the engine is like now, worst first.
    """
    found = [finding for finding in memory.all_findings if finding.open and not healed(engine, memory, finding)]
    return tuple(sorted(found, key=lambda finding: _STATES[finding.kind], reverse=True))


def engine_state(engine: EngineFacts, memory: EngineMemory) -> State:
    """
    The worst that holds now; idle or healthy where nothing does.
    """
    state = max((_STATES[finding.kind] for finding in current_findings(engine, memory)), default=State.HEALTHY)
    return State.IDLE if state is State.HEALTHY and (engine.idle or engine.ended) else state


def engine_headline(engine: EngineFacts, memory: EngineMemory, now: Moment) -> str:
    """
    What a tired person reads first.
    """
    current = current_findings(engine, memory)
    if current:
        worst = current[0]
        if worst.kind is FindingKind.WEDGED:
            guard = next((f for f in current if f.kind is FindingKind.GUARD_DISAGREEMENT), None)
            tail = f": {guard.sentence}" if guard else f" at step {worst.step}: {worst.sentence}"
            return f"Wedged{tail}"
        return sentence_case(worst.sentence)
    labels = joined(rank.label for rank in engine.ranks)
    if engine.ended:
        return (
            f"Ended after step {engine.newest_step}; another engine has taken its place"
            if engine.replaced
            else f"Ended after step {engine.newest_step}"
        )
    step = min(rank.history.last for rank in engine.ranks)
    fix = ", with the trim fix on" if all(rank.trim is MitigationState.APPLIED for rank in engine.ranks) else ""
    if step == 0:
        return (
            f"{labels} are up and have begun no step yet{fix}"
            if len(engine.ranks) > 1
            else f"{labels} is up and has begun no step yet{fix}"
        )
    agree = f"{labels} agree up to step {step}{fix}" if len(engine.ranks) > 1 else f"{labels} is at step {step}{fix}"
    if engine.idle:
        quiet = min(rank.quiet_seconds for rank in engine.ranks) + (engine.data_age_seconds(now) or 0.0)
        return f"Idle for {seconds(quiet)}; {agree}"
    return sentence_case(agree)


def sentence_case(text: str) -> str:
    """
    The text with a capital in front, unless it begins with the name of a rank.
    """
    return text if re.match(r"[dpt]p\d", text) else text[:1].upper() + text[1:]


def drift_by_rank(engine: EngineFacts) -> tuple[tuple[str, int | None], ...]:
    """
    Largest drift of each rank over its newest steps; None where it is not known.
    """
    answer = []
    for rank in engine.ranks:
        latest = latest_drift(rank, max(1, rank.report.identity.pp_size))
        answer.append((rank.label, None if latest is None else latest.tokens))
    return tuple(answer)
