"""
Planning a toggle of the trim fix: whether it can work, and what to tell before it is done.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope_exporter.contract import MitigationState, RankLife
from rankscope_exporter.flight.layout import MAX_EFFECTIVE_STEP, MAX_GENERATION
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, joined
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.fix import acting_on, fix_holds, requested_generation
from rankscope_server.domain.model import FindingKind
from rankscope_server.domain.ports import TogglePlan

MIN_MARGIN = 16
"""
Steps between the newest step known and the one at which ranks act, at least.
"""

DELIVERY_SECONDS = 0.75
"""
Time within which a command reaches every rank of a healthy deployment; steps go on meanwhile.
"""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """
    A toggle on one engine.
    """

    engine: str
    effective_step: int
    """0: at once; the ranks have begun no step yet."""
    running: bool
    """Whether steps are being taken; an idle engine acts at its next step."""
    refusal: str


def effective_step(engine: EngineFacts, rate: float | None, now: Moment) -> int:
    """
    The step at which every rank of an engine can still act together.

    An engine that runs is met far enough ahead that the command is at every rank before; one that idles acts at its
    next step, since nothing happens before it; one that has begun no step yet acts at once.
    """
    newest = engine.newest_step
    if newest == 0:
        return 0
    if engine.idle:
        return newest + 1
    age = engine.data_age_seconds(now) or 0.0
    pp_size = max(rank.report.identity.pp_size for rank in engine.ranks)
    margin = max(MIN_MARGIN, math.ceil((rate or 0.0) * (DELIVERY_SECONDS + age)) + pp_size + 1)
    return min(newest + margin, MAX_EFFECTIVE_STEP)


def next_generation(stored: int, engines: Sequence[EngineFacts]) -> int:
    """
    A generation above every one that was ever given out or is at a rank.

    Raises:
        ValueError: there is none left.

    """
    generation = max([stored, *(requested_generation(engine) for engine in engines)]) + 1
    if generation > MAX_GENERATION:
        msg = f"generation {generation} does not fit the control word: restart the engines, and begin with a new data directory"
        raise ValueError(msg)
    return generation


def plan_engine(
    engine: EngineFacts, memory: EngineMemory, rate: float | None, now: Moment, *, desired: bool
) -> EnginePlan:
    """
    Whether and when one engine can be toggled.
    """
    refusal = refuse_runner(engine) or refuse_delivery(engine, memory, now) or refuse_state(engine, desired=desired)
    return EnginePlan(
        engine.engine, effective_step(engine, rate, now), not engine.idle and engine.newest_step > 0, refusal
    )


def refuse_runner(engine: EngineFacts) -> str:
    """
    Why the trim fix is not for the model runner of an engine, whatever its ranks do; empty if it may be.
    """
    if all(rank.is_v2 and rank.trim is MitigationState.NOT_APPLICABLE for rank in engine.ranks):
        return "not applicable on V2: it keeps no output tokens to trim"
    return ""


def refuse_delivery(engine: EngineFacts, memory: EngineMemory, now: Moment) -> str:
    """
    Why no command can be given to an engine now; empty if it can.
    """
    if engine.ended:
        return "the engine has ended: its processes are gone; start vLLM again"
    for exporter in engine.exporters:
        if exporter.out_of_reach(now) or exporter.error:
            return f"the exporter {exporter.url} cannot be reached: {exporter.error or 'it gives no answer'}"
        if exporter.control is False:
            return f"the exporter {exporter.url} takes no commands: start it with RANKSCOPE_CONTROL_TOKEN_FILE set"
        if not exporter.token:
            return f"the server has no token for deployment {engine.deployment}: set control_token_file in its configuration (or token-file= in --target)"
    if engine.missing:
        return f"{engine.missing} of its ranks are not seen: name the exporters of all its nodes in the deployment"
    if memory.has(FindingKind.WEDGED):
        return "the engine is wedged: no rank takes another step, so none would act; restart vLLM, then turn it on"
    if memory.has(FindingKind.STALLED):
        return "no rank takes a step at present, so none would act; see the finding first"
    for rank in engine.ranks:
        if rank.failure is not None:
            return f"{rank.label} failed in step {rank.failure.step} and takes no further one: restart vLLM first"
    unseen = [rank for rank in engine.ranks if rank.report.life is RankLife.UNKNOWN]
    if unseen:
        return f"whether {joined(r.label for r in unseen)} {'run' if len(unseen) > 1 else 'runs'} is unknown: let the exporter share vLLM's process namespace"
    lifeless = [rank for rank in engine.ranks if rank.report.life is not RankLife.RUNNING]
    if lifeless:
        return f"{joined(r.label for r in lifeless)} {'are' if len(lifeless) > 1 else 'is'} {lifeless[0].report.life.value}: a toggle needs every rank"
    return ""


def refuse_state(engine: EngineFacts, *, desired: bool) -> str:
    """
    Why the trim fix cannot be turned on (or off) on these ranks; empty if it can.
    """
    for rank in engine.ranks:
        reason = f": {rank.trim_reason}" if rank.trim_reason else ""
        if rank.trim is None or rank.trim is MitigationState.UNKNOWN_CODE:
            return f"{rank.label} does not know the code that vLLM has loaded{reason}; run rankscope-exporter doctor beside it"
        if rank.trim is MitigationState.NOT_APPLICABLE:
            return f"{rank.label} has nothing to fix{reason}"
    pending = any(acting_on(rank) for rank in engine.ranks)
    if fix_holds(engine, desired=desired) and not pending:
        return f"the trim fix is {'on' if desired else 'off'} already on every rank"
    return ""


def plan_toggle(
    deployment: str,
    engines: Sequence[EngineFacts],
    *,
    memories: Mapping[str, EngineMemory],
    rates: Mapping[str, float | None],
    now: Moment,
    desired: bool,
) -> TogglePlan:
    """
    What a toggle of these engines would do. Engines that are already as wanted are left out, unless all are.
    """
    plans = {
        engine.engine: plan_engine(engine, memories[engine.engine], rates.get(engine.engine), now, desired=desired)
        for engine in engines
    }
    concerned = [e for e in engines if plans[e.engine].refusal or not fix_holds(e, desired=desired)] or list(engines)
    concerned = [e for e in concerned if not fix_holds(e, desired=desired)] or concerned
    refused = [(e, plans[e.engine].refusal) for e in concerned if plans[e.engine].refusal]
    refusal = ""
    if not engines:
        refusal = f"no engine of {deployment} is known: start vLLM with rankscope-exporter installed, and its exporter"
    elif refused:
        refusal = f"{refused[0][0].engine}: {refused[0][1]}" if len(engines) > 1 else refused[0][1]
    steps = [plans[e.engine].effective_step for e in concerned if plans[e.engine].running]
    several = len(concerned) > 1
    return TogglePlan(
        deployment=deployment,
        desired=desired,
        engines=tuple(e.engine for e in concerned),
        ranks=tuple(f"{e.engine} {rank.label}" if several else rank.label for e in concerned for rank in e.ranks),
        effective_step=max(steps, default=None),
        timing=_timing(concerned, steps, rates),
        changes=CHANGES_ON if desired else CHANGES_OFF,
        limits=LIMITS_ON if desired else LIMITS_OFF,
        refusal=refusal,
    )


def _timing(
    engines: Sequence[EngineFacts],
    steps: Sequence[int],
    rates: Mapping[str, float | None],
) -> str:
    if not steps:
        return "The ranks take no steps at present: every rank acts at its next one." if engines else ""
    if len(engines) > 1:
        return "Every rank acts at the same step of its engine, within a few seconds."
    engine = engines[0]
    rate = rates.get(engine.engine) or 0.0
    ahead = max(steps) - engine.newest_step
    within = f", in about {max(1, round(ahead / rate))} s" if rate > 0 else ""
    return f"Every rank acts at about step {max(steps)}{within}; all at the same step."


CHANGES_ON = (
    "Ranks before the last one then take back the draft tokens that were not accepted, as the last rank always does. "
    "It replaces one function of vLLM in the running processes; nothing is restarted and no request is dropped."
)
CHANGES_OFF = "The ranks run vLLM's own code again: with speculative decoding, requests drift from the next rejected draft token on."
LIMITS_ON = (
    "It does not revive an engine that is wedged already.",
    "It does not repair tokens that were sent while masks differed.",
    "It lasts for the life of the vLLM process; after a restart the server turns it on again.",
)
LIMITS_OFF = (
    "Requests that are running begin to drift at once; the ranks may part and wedge within minutes.",
    "Engines that vLLM starts with RANKSCOPE_TRIM_FIX=on are turned off again after a restart, too.",
)
