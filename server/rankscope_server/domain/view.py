"""
From what was polled to what pages show.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope_exporter.contract import Detail, Guard, Lengths, Phase, RankLife
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.drift import latest_drift
from rankscope_server.domain.facts import EngineFacts, ExporterFacts, RankFacts, joined, most_common, plain_url, seconds
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.fix import build_progress, fix_state
from rankscope_server.domain.model import (
    AuditRow,
    DeploymentCard,
    DeploymentRole,
    DeviceView,
    EngineCard,
    EngineView,
    ExchangeView,
    FindingKind,
    FixView,
    HookView,
    HostLengths,
    QueueView,
    RankView,
    RequestView,
    State,
)
from rankscope_server.domain.outlook import UNFORESEEN, Forecast
from rankscope_server.domain.ports import TogglePlan
from rankscope_server.domain.sight import describe_unknown_code
from rankscope_server.domain.state import drift_by_rank, engine_headline, engine_state
from rankscope_server.domain.strip import build_strip
from rankscope_server.domain.words import guard_word, last_did

REQUESTS_SHOWN = 64
RECENT_STEPS = 256
"""
Rows of the request table that a rank last touched longer ago than this are of requests that no longer drift.
"""

RECENT_RECORDS = 8
"""
Records among which the newest is looked for that has come far enough.
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
    forecast: Forecast = UNFORESEEN
    incident: str = ""


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
        unknown_code=describe_unknown_code(engine),
        drift_unknown=explain_unknown_drift(engine),
        requests_unknown=explain_unknown_requests(engine),
        acted=context.memory.acted,
        forecast=context.forecast,
        incident=context.incident,
    )


def _rank(rank: RankFacts, engine: EngineFacts, context: EngineContext, now: Moment) -> RankView:
    silent = _silent(rank, engine, now)
    # What it did after the last answer is not known, nor for how long it did it.
    seen = Moment(now.unix_of(rank.clock.received), rank.clock.received) if silent else now
    newest = rank.history.newest()
    latest = latest_drift(rank, max(1, rank.report.identity.pp_size))
    decided = newest is not None and int(newest["phase"]) >= Phase.DECIDED
    peers = tuple(peer for peer in engine.ranks if peer.id.dp_rank == rank.id.dp_rank)
    return RankView(
        id=rank.id,
        label=rank.label,
        key=rank.report.key,
        life=(RankLife.UNKNOWN if silent else rank.report.life).value,
        step=max(rank.history.last, rank.report.step),
        phase=_phase_word(rank, newest),
        in_flight_seconds=rank.in_flight_seconds(seen),
        steps_per_second=None if silent else context.rates.get(rank.report.key),
        drift_max=None if latest is None else latest.tokens,
        drifting=None if latest is None else latest.requests,
        requests=int(newest["new"]) + int(newest["cached"]) if newest is not None else None,
        masked=int(newest["masked"]) if newest is not None and decided and newest["mask_known"] else None,
        guard=guard_word(newest),
        last_did=f"{last_did(rank, peers, seen)}{_unheard(rank, now) if silent else ''}",
        hooks=tuple(HookView(hook.hook, hook.state.value, hook.reason) for hook in rank.report.hooks),
        fix_state=rank.trim.label if rank.trim is not None else "unknown",
        fix_reason=rank.trim_reason,
        faults=rank.report.faults,
        pid=rank.report.identity.pid,
        host=rank.report.identity.host,
        failed=rank.failure is not None,
        host_lengths=_host_lengths(rank),
        device=_device(rank, now),
        exchange=_exchange(rank),
        queue=_queue(rank),
    )


def _silent(rank: RankFacts, engine: EngineFacts, now: Moment) -> bool:
    """
    Whether the exporter of a rank is out of reach. A process that is known to be gone stays gone.
    """
    if rank.report.life is RankLife.GONE:
        return False
    return any(one.url == rank.exporter and one.out_of_reach(now) for one in engine.exporters)


def _unheard(rank: RankFacts, now: Moment) -> str:
    return f"; nothing was heard of it for {seconds(max(0.0, now.monotonic - rank.clock.received))} since"


def _phase_word(rank: RankFacts, newest: np.void | None) -> str:
    if newest is None:
        return "no step yet"
    word = _PHASES.get(Phase(int(newest["phase"])), "unknown")
    return f"{word}, then failed" if rank.failure is not None else word


def _newest_at(rank: RankFacts, phase: Phase) -> np.void | None:
    """
    The newest of a V2 rank's last records that has come as far as `phase`; None if none has, and on other runners.
    """
    if not rank.is_v2:
        return None
    return next((record for record in rank.history.backwards(RECENT_RECORDS) if int(record["phase"]) >= phase), None)


def _host_lengths(rank: RankFacts) -> HostLengths | None:
    record = _newest_at(rank, Phase.STATE_UPDATED)
    if record is None or int(record["lengths"]) != Lengths.COMPUTED_TOKENS:
        return None
    return HostLengths(int(record["state_sum"]), int(record["state_max"]), int(record["drift_max"]))


def _device(rank: RankFacts, now: Moment) -> DeviceView | None:
    device = rank.device
    if device is None:
        return None
    return DeviceView(
        step=device.step,
        age_seconds=rank.device_age_seconds(now),
        every=device.every,
        rows=device.rows,
        excess_rows=device.excess_rows,
        total_excess=device.total_excess,
        computed_excess=device.computed_excess,
    )


def _exchange(rank: RankFacts) -> ExchangeView | None:
    record = _newest_at(rank, Phase.DECIDED)
    if record is None:
        return None
    return ExchangeView(
        step=int(record["step"]),
        width=(int(record["width"]) or None) if int(record["guard"]) == Guard.BROADCAST else None,
        posted=int(record["posted"]),
        posted_total=int(record["posted_total"]),
        completed_total=_completed_total(rank),
    )


def _completed_total(rank: RankFacts) -> int | None:
    record = _newest_at(rank, Phase.DONE) if rank.report.identity.completes else None
    return None if record is None else int(record["completed_total"])


def _queue(rank: RankFacts) -> QueueView | None:
    record = _newest_at(rank, Phase.STATE_UPDATED)
    if record is None or not int(record["queue_depth"]):
        return None
    return QueueView(int(record["queue_depth"]), int(record["queue_filled"]), int(record["dropped_total"]))


def explain_unknown_drift(engine: EngineFacts) -> str:
    """
    Why no drift of an engine can be shown, with the remedy; empty where it can.
    """
    if not all(rank.is_v2 and rank.device is None for rank in engine.ranks):
        return ""
    failed = [hook for rank in engine.ranks for hook in rank.lost_hooks if hook.hook == "device_lengths"]
    if failed:
        return f"Drift is unknown here: lengths on the device could not be sampled ({failed[0].reason or 'no reason given'})."
    return (
        "Drift is unknown here: the V2 model runner keeps request lengths on the device, and no sample of them has come. "
        "Set RANKSCOPE_DEVICE_LENGTHS_STEPS in vLLM's environment, say to 200, to have them sampled once in so many steps."
    )


def explain_unknown_requests(engine: EngineFacts) -> str:
    """
    Why it is not known which requests of an engine drift; empty where it is.
    """
    if any(rank.is_v2 for rank in engine.ranks):
        return "Not known on V2: request lengths are on the device, and are sampled only all together."
    reduced = [rank.label for rank in engine.ranks if rank.report.detail is not Detail.FULL]
    if reduced:
        return f"Not known: {joined(reduced)} {'are' if len(reduced) > 1 else 'is'} over the budget of own time and {'keep' if len(reduced) > 1 else 'keeps'} no table of requests."
    return ""


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
        if rank.requests is not None and rank.requests.drifting > 0 and not rank.is_v2
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


def build_engine_card(
    engine: EngineFacts,
    memory: EngineMemory,
    rate: float | None,
    now: Moment,
    *,
    forecast: Forecast = UNFORESEEN,
    incident: str = "",
) -> EngineCard:
    """
    An engine on the fleet page.
    """
    return EngineCard(
        engine=engine.engine,
        state=engine_state(engine, memory),
        ranks=drift_by_rank(engine),
        steps_per_second=None if _unseen(engine, now) else rate,
        headline=engine_headline(engine, memory, now),
        fix_state=fix_state(engine),
        ended=engine.ended,
        forecast=forecast,
        incident=incident,
    )


def _unseen(engine: EngineFacts, now: Moment) -> bool:
    """
    Whether none of an engine's exporters is in reach: how fast it is now is not known.
    """
    return bool(engine.exporters) and all(exporter.out_of_reach(now) for exporter in engine.exporters)


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
        unknown_code=next(filter(None, (describe_unknown_code(facts) for facts, _ in judged)), ""),
    )


def exporter_problem(exporter: ExporterFacts, now: Moment) -> str:
    """
    What is wrong with an exporter, with the remedy.
    """
    age = exporter.age_seconds(now)
    ago = "has not answered yet" if age is None else f"last answered {seconds(age)} ago"
    error = exporter.error or "it gives no answer; see that it runs and that the address is right"
    return f"{plain_url(exporter.url)} {ago}: {error}"


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
