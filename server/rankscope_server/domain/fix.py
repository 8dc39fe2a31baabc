"""
Where the trim fix stands on an engine, and how far a toggle has come.
"""

from rankscope_exporter.contract import ControlOutcome, ControlReport, MitigationState
from rankscope_server.domain.facts import EngineFacts, RankFacts
from rankscope_server.domain.model import ToggleProgress

ACTED = (ControlOutcome.APPLIED, ControlOutcome.APPLIED_LATE)
ANSWERED = (*ACTED, ControlOutcome.REFUSED, ControlOutcome.FAILED)


def fix_state(engine: EngineFacts) -> str:
    """
    `applied`, `available`, `not applicable`, `unknown code`, `mixed`, or `unknown` where a rank says nothing.
    """
    states = {rank.trim for rank in engine.ranks}
    if None in states:
        return "unknown"
    return next(iter(states)).label if len(states) == 1 else "mixed"  # type: ignore[union-attr]


def requested_generation(engine: EngineFacts) -> int:
    """
    The newest generation that any rank was sent or has seen; 0 if none was.
    """
    return max(
        max(rank.report.control.requested_generation, rank.report.control.observed_generation) for rank in engine.ranks
    )


def acting_on(rank: RankFacts) -> bool:
    """
    Whether a command is on its way to a rank, or seen and waiting for its step.
    """
    control = rank.report.control
    return control.observed_generation < control.requested_generation or control.outcome is ControlOutcome.PENDING


def acknowledged(rank: RankFacts, generation: int) -> bool:
    """
    Whether a rank has acted on (or refused) the command of that generation.
    """
    control = rank.report.control
    return control.observed_generation == generation and control.outcome in ANSWERED


def build_progress(engine: EngineFacts) -> ToggleProgress | None:
    """
    How far the ranks have come with the newest command; None if there never was one.
    """
    generation = requested_generation(engine)
    if generation == 0:
        return None
    command = next(
        r.report.control
        for r in engine.ranks
        if generation in (r.report.control.requested_generation, r.report.control.observed_generation)
    )
    acted = [
        rank.report.control.acted_step
        for rank in engine.ranks
        if rank.report.control.observed_generation == generation and rank.report.control.outcome in ACTED
    ]
    return ToggleProgress(
        desired=bool(command.desired),
        generation=generation,
        effective_step=command.effective_step,
        acknowledged=sum(acknowledged(rank, generation) for rank in engine.ranks),
        ranks=len(engine.ranks),
        per_rank=tuple((rank.label, rank_outcome(rank, generation, command)) for rank in engine.ranks),
        applied_step_spread=max(acted) - min(acted) if len(acted) == len(engine.ranks) else None,
    )


def rank_outcome(rank: RankFacts, generation: int, command: ControlReport) -> str:
    """
    What a rank did with a command, in words.
    """
    control = rank.report.control
    verb = "applied" if command.desired else "turned off"
    if control.requested_generation < generation and control.observed_generation < generation:
        return "not sent yet"
    if control.observed_generation < generation or control.outcome in (ControlOutcome.NONE, ControlOutcome.PENDING):
        return (
            f"pending, acts at step {command.effective_step}"
            if command.effective_step
            else "pending, acts at its next step"
        )
    if control.outcome is ControlOutcome.APPLIED:
        return f"{verb} at step {control.acted_step}"
    if control.outcome is ControlOutcome.APPLIED_LATE:
        return f"{verb} late, at step {control.acted_step} (asked for step {command.effective_step})"
    word = "refused" if control.outcome is ControlOutcome.REFUSED else "failed"
    return f"{word}: {rank.trim_reason or (rank.trim.label if rank.trim is not None else 'no reason given')}"


def fix_holds(engine: EngineFacts, *, desired: bool) -> bool:
    """
    Whether every rank already is as `desired` says.
    """
    wanted = (MitigationState.APPLIED,) if desired else (MitigationState.AVAILABLE,)
    return all(rank.trim in wanted for rank in engine.ranks)
