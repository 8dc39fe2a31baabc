"""
From what was polled to what pages show.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope_exporter.contract import Phase
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.drift import latest_drift
from rankscope_server.domain.facts import EngineFacts, ExporterFacts, RankFacts, most_common, seconds
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.fix import build_progress, fix_state
from rankscope_server.domain.model import (
    AuditRow,
    DeploymentCard,
    DeploymentRole,
    EngineCard,
    EngineView,
    FindingKind,
    FixView,
    HookView,
    RankView,
    RequestView,
    State,
)
from rankscope_server.domain.ports import TogglePlan
from rankscope_server.domain.state import drift_by_rank, engine_headline, engine_state
from rankscope_server.domain.strip import build_strip
from rankscope_server.domain.words import guard_word, last_did

REQUESTS_SHOWN = 64
RECENT_STEPS = 256
"""
Rows of the request table that a rank last touched longer ago than this are of requests that no longer drift.
"""

_PHASES = {
    Phase.SCHEDULED: "scheduled",
    Phase.STATE_UPDATED: "state updated",
    Phase.DECIDED: "decided",
    Phase.DONE: "done",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    What the operators asked for, as the store has it.
    """

    desired: bool
    generation: int
    actor: str
    at_unix: float


@dataclass(frozen=True, slots=True)
class EngineContext:
    """
    What a view needs beside the polled facts.
    """

    role: DeploymentRole
    memory: EngineMemory
    rates: dict[str, float | None]
    """Steps per second by rank key."""
    wanted: Wanted | None
    on: TogglePlan
    """What turning the fix on would do."""
    off: TogglePlan
    audit: tuple[AuditRow, ...] = ()


def build_engine(engine: EngineFacts, context: EngineContext, now: Moment) -> EngineView:
    """
    Everything that the engine page shows.
    """
    return EngineView(
        deployment=engine.deployment,
        role=context.role,
        engine=engine.engine,
        model=most_common(rank.report.identity.model for rank in engine.ranks),
        vllm_version=most_common(rank.report.identity.vllm_version for rank in engine.ranks),
        runner=most_common(rank.report.identity.runner for rank in engine.ranks),
        state=engine_state(engine, context.memory),
        headline=engine_headline(engine, context.memory, now),
        data_age_seconds=engine.data_age_seconds(now),
        findings=context.memory.all_findings,
        ranks=tuple(_rank(rank, engine, context, now) for rank in engine.ranks),
        strip=build_strip(engine),
        requests=_requests(engine),
        fix=_fix(engine, context),
        audit=context.audit,
        ended=engine.ended,
    )


def _rank(rank: RankFacts, engine: EngineFacts, context: EngineContext, now: Moment) -> RankView:
    newest = rank.history.newest()
    latest = latest_drift(rank, max(1, rank.report.identity.pp_size))
    decided = newest is not None and int(newest["phase"]) >= Phase.DECIDED
    peers = tuple(peer for peer in engine.ranks if peer.id.dp_rank == rank.id.dp_rank)
    return RankView(
        id=rank.id,
        label=rank.label,
        key=rank.report.key,
        life=rank.report.life.value,
        step=max(rank.history.last, rank.report.step),
        phase="no step yet" if newest is None else _PHASES.get(Phase(int(newest["phase"])), "unknown"),
        in_flight_seconds=rank.in_flight_seconds(now),
        steps_per_second=context.rates.get(rank.report.key),
        drift_max=None if latest is None else latest[0],
        drifting=None if latest is None else latest[1],
        requests=int(newest["new"]) + int(newest["cached"]) if newest is not None else None,
        masked=int(newest["masked"]) if newest is not None and decided and newest["mask_known"] else None,
        guard=guard_word(newest),
        last_did=last_did(rank, peers, now),
        hooks=tuple(HookView(hook.hook, hook.state.value, hook.reason) for hook in rank.report.hooks),
        fix_state=rank.trim.label if rank.trim is not None else "unknown",
        fix_reason=rank.trim_reason,
        faults=rank.report.faults,
        pid=rank.report.identity.pid,
        host=rank.report.identity.host,
    )


def _requests(engine: EngineFacts) -> tuple[RequestView, ...]:
    rows = [
        RequestView(
            row.request_id,
            rank.label,
            row.state_length,
            row.scheduler_length,
            row.drift,
            row.masked,
            row.margin,
            row.first_drift_step,
        )
        for rank in engine.ranks
        if rank.requests is not None and rank.requests.drifting > 0
        for row in rank.requests.rows
        if row.drift > 0 and row.step + RECENT_STEPS > rank.history.last
    ]
    return tuple(sorted(rows, key=lambda row: (-row.drift, row.request_id, row.rank))[:REQUESTS_SHOWN])


def _fix(engine: EngineFacts, context: EngineContext) -> FixView:
    wanted = context.wanted
    # The reason that matters is that of the way that is open to go: on, unless it is on already.
    refusal = ""
    if context.on.refusal and context.off.refusal:
        refusal = context.off.refusal if fix_state(engine) == "applied" else context.on.refusal
    return FixView(
        state=fix_state(engine),
        desired=None if wanted is None else wanted.desired,
        can_turn_on=not context.on.refusal,
        can_turn_off=not context.off.refusal,
        refusal=refusal,
        progress=build_progress(engine),
        last_actor=None if wanted is None else wanted.actor,
        last_changed_unix=None if wanted is None else wanted.at_unix,
    )


def build_engine_card(engine: EngineFacts, memory: EngineMemory, rate: float | None, now: Moment) -> EngineCard:
    """
    An engine on the fleet page.
    """
    return EngineCard(
        engine=engine.engine,
        state=engine_state(engine, memory),
        ranks=drift_by_rank(engine),
        steps_per_second=rate,
        headline=engine_headline(engine, memory, now),
        fix_state=fix_state(engine),
        ended=engine.ended,
    )


def build_deployment(
    name: str,
    role: DeploymentRole,
    engines: Sequence[tuple[EngineFacts, EngineCard]],
    *,
    exporters: Sequence[ExporterFacts],
    unreadable: Sequence[str],
    sparkline: tuple[float | None, ...],
    now: Moment,
) -> DeploymentCard:
    """
    A deployment on the fleet page: its state is the worst of the engines that are still to be judged.
    """
    problems = (
        *(exporter_problem(exporter, now) for exporter in exporters if exporter.error or exporter.out_of_reach(now)),
        *unreadable,
    )
    judged = [(facts, card) for facts, card in engines if not facts.replaced]
    ages = [exporter.age_seconds(now) for exporter in exporters]
    if judged:
        _, worst = max(judged, key=lambda pair: pair[1].state)
        state, headline = worst.state, worst.headline
    else:
        state = State.BLIND
        headline = (
            problems[0]
            if problems
            else "No engine yet: start vLLM with rankscope-exporter installed and RANKSCOPE_FLIGHT_DIR as its exporter has it"
        )
    if problems and state < State.BLIND:
        state, headline = State.BLIND, problems[0]
    identities = [rank.report.identity for facts, _ in (judged or engines) for rank in facts.ranks]
    states = {card.fix_state for _, card in judged}
    return DeploymentCard(
        name=name,
        role=role,
        model=most_common(identity.model for identity in identities),
        vllm_version=most_common(identity.vllm_version for identity in identities),
        runner=most_common(identity.runner for identity in identities),
        state=state,
        headline=headline,
        data_age_seconds=None if not ages or None in ages else max(age for age in ages if age is not None),
        engines=tuple(card for _, card in engines),
        sparkline=sparkline,
        fix_state="unknown" if not states else next(iter(states)) if len(states) == 1 else "mixed",
        problems=problems,
    )


def exporter_problem(exporter: ExporterFacts, now: Moment) -> str:
    """
    What is wrong with an exporter, with the remedy.
    """
    age = exporter.age_seconds(now)
    ago = "has not answered yet" if age is None else f"last answered {seconds(age)} ago"
    error = exporter.error or "it gives no answer; see that it runs and that the address is right"
    return f"{re.sub(r'//[^@/]*@', '//', exporter.url)} {ago}: {error}"


def needs(card: DeploymentCard) -> tuple[int, str]:
    """
    Sort key of the fleet page: what needs somebody most comes first.
    """
    return -int(card.state), card.name


def has_drift(memory: EngineMemory) -> bool:
    """
    Whether requests are worth asking for: something drifts, or has parted.
    """
    return memory.has(
        FindingKind.DRIFT, FindingKind.MASK_DISAGREEMENT, FindingKind.GUARD_DISAGREEMENT, FindingKind.WEDGED
    )
