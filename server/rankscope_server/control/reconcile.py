"""
Which commands an engine still lacks: pure, looked at each second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rankscope_exporter.contract import MitigationState
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.fix import requested_generation
from rankscope_server.domain.toggle import effective_step, refuse_delivery
from rankscope_server.store import DesiredRow


@dataclass(frozen=True, slots=True)
class Step:
    """
    What to do about an engine.
    """

    send: bool
    anew: bool
    """Whether a new generation is needed: the old command's step is gone by, so ranks would act apart."""
    effective_step: int
    exporters: tuple[str, ...]
    """The exporters that the command goes to."""
    reason: str
    """Why something is sent, or why it cannot be."""


NOTHING = Step(send=False, anew=False, effective_step=0, exporters=(), reason="")


def wanted_of(rows: Sequence[DesiredRow], deployment: str, engine: str) -> DesiredRow | None:
    """
    What is wanted of an engine: what was said of it, or else of its deployment.
    """
    own = [row for row in rows if row.deployment == deployment and row.engine == engine]
    general = [row for row in rows if row.deployment == deployment and not row.engine]
    return next(iter([*own, *general]), None)


def plan_reconcile(
    engine: EngineFacts, wanted: DesiredRow | None, memory: EngineMemory, rate: float | None, now: Moment
) -> Step:
    """
    Compare what is wanted of an engine with what its ranks were told.
    """
    if wanted is None or engine.ended or engine.replaced:
        return NOTHING
    generations = {rank.report.key: rank.report.control.requested_generation for rank in engine.ranks}
    newest = requested_generation(engine)
    if newest > wanted.generation or all(generation == wanted.generation for generation in generations.values()):
        return NOTHING  # told by somebody who knows better, or told already
    target = MitigationState.APPLIED if wanted.desired else MitigationState.AVAILABLE
    if newest == 0 and all(rank.trim is target for rank in engine.ranks):
        return NOTHING  # came up as it should be
    refusal = refuse_delivery(engine, memory, now) or _refuse_unknown(engine)
    if refusal:
        return Step(send=False, anew=False, effective_step=0, exporters=(), reason=refusal)
    everywhere = tuple(exporter.url for exporter in engine.exporters)
    if newest < wanted.generation:
        reason = "came up anew" if newest == 0 else f"was left at generation {newest}"
        return Step(
            send=True, anew=False, effective_step=effective_step(engine, rate, now), exporters=everywhere, reason=reason
        )
    told = next(
        rank.report.control for rank in engine.ranks if rank.report.control.requested_generation == wanted.generation
    )
    lacking = tuple(
        dict.fromkeys(rank.exporter for rank in engine.ranks if generations[rank.report.key] < wanted.generation)
    )
    if told.effective_step > engine.newest_step:
        return Step(
            send=True,
            anew=False,
            effective_step=told.effective_step,
            exporters=lacking,
            reason="some ranks were not told",
        )
    return Step(
        send=True,
        anew=True,
        effective_step=effective_step(engine, rate, now),
        exporters=everywhere,
        reason="some ranks were not told in time",
    )


def _refuse_unknown(engine: EngineFacts) -> str:
    for rank in engine.ranks:
        if rank.trim not in (MitigationState.AVAILABLE, MitigationState.APPLIED):
            return f"{rank.label}: the trim fix is {'unknown' if rank.trim is None else rank.trim.label} there"
    return ""
