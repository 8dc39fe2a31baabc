"""
Ranks made by hand, as the server sees them after polling; and a clock that only tests turn.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import numpy as np

from rankscope_exporter.contract import (
    ControlOutcome,
    ControlReport,
    Detail,
    DeviceLengths,
    Guard,
    HookReport,
    HookState,
    Lengths,
    MitigationReport,
    MitigationState,
    Phase,
    RankIdentity,
    RankLife,
    RankReport,
    Role,
    StepFailure,
)
from rankscope_exporter.flight.layout import STEP_DTYPE
from rankscope_server.domain.clock import Moment, NodeClock
from rankscope_server.domain.facts import EngineFacts, ExporterFacts, RankFacts, rank_labels
from rankscope_server.domain.history import StepHistory
from rankscope_server.domain.model import RankId

START_UNIX = 1_700_000_000.0
STEP_NS = 20_000_000
"""A step every 20 ms, the first at node time 1 s."""


class ManualClock:
    """
    A clock that stands still until a test moves it; waiting gives others their turn and takes no time.
    """

    def __init__(self) -> None:
        self.moment = Moment(START_UNIX, 1000.0)

    def now(self) -> Moment:
        return self.moment

    def advance(self, seconds: float) -> None:
        self.moment = Moment(self.moment.unix + seconds, self.moment.monotonic + seconds)

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(0.001)


def begin_ns(step: int) -> int:
    """When a step of `made_records` begins, by the node's clock."""
    return 1_000_000_000 + step * STEP_NS


def made_record(
    step: int, phase: Phase = Phase.DONE, *, requests: int = 8, masked: int = 0, **fields: Any
) -> np.ndarray:
    """One healthy record with what `fields` say otherwise; parts beyond `phase` are zero, as readers leave them."""
    record = np.zeros(1, STEP_DTYPE)
    begin = begin_ns(step)
    values: dict[str, Any] = {
        "step": step,
        "batch_hash": 77 + step,
        "begin_ns": begin,
        "cached": requests,
        "scheduled_tokens": requests,
        "phase": phase,
    }
    if phase >= Phase.STATE_UPDATED:
        values |= {
            "state_sum": 100 * requests,
            "scheduler_sum": 100 * requests,
            "state_max": 100,
            "scheduler_max": 100,
            "lengths": 1,
            "mitigation": MitigationState.AVAILABLE,
        }
    if phase >= Phase.DECIDED:
        values |= {
            "decide_ns": begin + STEP_NS // 2, "requests": requests, "masked": masked, "mask_hash": masked, "mask_known": 1, "width": 1,
            "guard": Guard.SKIP if requests and masked == requests else Guard.BROADCAST, "role": Role.RECEIVER,
        }  # fmt: skip
    if phase >= Phase.DONE:
        values |= {"end_ns": begin + STEP_NS * 3 // 4}
    for name, value in (values | fields).items():
        record[name] = value
    return record


def made_v2_record(step: int, phase: Phase = Phase.DONE, *, role: Role = Role.RECEIVER, **fields: Any) -> np.ndarray:
    """The same of a V2 rank with three draft tokens: four columns in three collectives, a receive queue at the receiver."""
    values: dict[str, Any] = {}
    if phase >= Phase.STATE_UPDATED:
        queue = {"queue_depth": 2, "queue_filled": 2} if role is Role.RECEIVER else {}
        values |= {"lengths": Lengths.COMPUTED_TOKENS, "mitigation": MitigationState.NOT_APPLICABLE} | queue
    if phase >= Phase.DECIDED:
        # The sender posts its drafts once it has them.
        posted = 3 if role is Role.RECEIVER or phase is Phase.DONE else 2
        values |= {"width": 4, "posted": posted, "posted_total": 3 * (step - 1) + posted, "role": role}
    if phase >= Phase.DONE:
        values |= {"completed_total": 3 * step}
    return made_record(step, phase, **(values | fields))


def made_v2_records(
    first: int, last: int, change: Callable[[int], dict[str, Any]] | None = None, *, role: Role = Role.RECEIVER
) -> np.ndarray:
    """Healthy records of a V2 rank from `first` to `last`; `change` gives what differs at a step."""
    return np.concatenate(
        [made_v2_record(step, role=role, **(change(step) if change else {})) for step in range(first, last + 1)]
    )


def made_records(first: int, last: int, change: Callable[[int], dict[str, Any]] | None = None) -> np.ndarray:
    """Healthy records from `first` to `last`; `change` gives what differs at a step."""
    if last < first:
        return np.zeros(0, STEP_DTYPE)
    return np.concatenate([made_record(step, **(change(step) if change else {})) for step in range(first, last + 1)])


def made_report(
    pp_rank: int = 0,
    *,
    engine: str = "e1",
    tp_rank: int = 0,
    dp_rank: int = 0,
    life: RankLife = RankLife.RUNNING,
    trim: MitigationState = MitigationState.AVAILABLE,
    trim_reason: str = "",
    hooks: Sequence[HookReport] | None = None,
    control: ControlReport | None = None,
    step: int = 0,
    faults: int = 0,
    detail: Detail = Detail.FULL,
    failure: StepFailure | None = None,
    device: DeviceLengths | None = None,
    started_unix: float = START_UNIX - 100,
    key: str | None = None,
    **identity: Any,
) -> RankReport:
    """A report of a healthy rank, with what the arguments say otherwise."""
    who = {
        "engine": engine, "dp_rank": dp_rank, "pp_rank": pp_rank, "tp_rank": tp_rank, "pp_size": 2, "tp_size": 1, "dp_size": 1, "global_rank": pp_rank,
        "host": "node-a", "pid": 4000 + pp_rank, "model": "some/model", "vllm_version": "0.27.1", "runner": "V1", "runner_class": "GPUModelRunner",
        "device": "cuda", "async_scheduling": True, "spec_method": "draft_model", "spec_tokens": 3, "exporter_version": "0.1.0",
    } | identity  # fmt: skip
    return RankReport(
        key=key or f"{engine}-dp{dp_rank}-pp{pp_rank}-tp{tp_rank}",
        identity=RankIdentity(**who),
        life=life,
        hooks=list(hooks) if hooks is not None else [HookReport(hook="_update_states", state=HookState.ON)],
        mitigations=[MitigationReport(mitigation="trim", state=trim, reason=trim_reason)],
        control=control or made_control(),
        step=step,
        phase=Phase.DONE,
        in_flight_seconds=None,
        last_activity_seconds=None,
        faults=faults,
        detail=detail,
        failure=failure,
        device=device,
        started_unix=started_unix,
    )


def made_v2_report(pp_rank: int = 0, **changes: Any) -> RankReport:
    """A report of a healthy V2 rank."""
    hooks = (
        "execute_model",
        "update_requests",
        "PPHandler.receive",
        "PPHandler.broadcast",
        "compute_need_sampled_mask",
    )
    v2: dict[str, Any] = {
        "runner": "V2", "vllm_version": "0.32.0", "spec_method": "eagle3", "trim": MitigationState.NOT_APPLICABLE,
        "hooks": [HookReport(hook=hook, state=HookState.ON) for hook in hooks],
    }  # fmt: skip
    return made_report(pp_rank, **(v2 | changes))


def made_device(excess: int = 0, *, step: int = 96, age: float | None = 4.0, every: int = 32) -> DeviceLengths:
    """A sample of device-side lengths of eight requests, two of them `excess` tokens longer than the scheduler allows."""
    return DeviceLengths(
        every=every, samples=step // every, step=step, age_seconds=age, rows=8, total_sum=900, computed_sum=892,
        excess_rows=2 if excess > 0 else 0, total_excess=excess, computed_excess=min(excess, 0),
    )  # fmt: skip


def made_control(
    requested: int = 0,
    observed: int | None = None,
    *,
    desired: bool = True,
    effective_step: int = 0,
    acted_step: int = 0,
    outcome: ControlOutcome | None = None,
) -> ControlReport:
    """What a rank says about the last command; acted upon unless told otherwise."""
    observed = requested if observed is None else observed
    if outcome is None:
        outcome = ControlOutcome.APPLIED if requested and observed == requested else ControlOutcome.NONE
    return ControlReport(
        requested_generation=requested,
        observed_generation=observed,
        desired=desired if requested else None,
        effective_step=effective_step,
        acted_step=acted_step,
        outcome=outcome,
    )


def made_rank(
    records: np.ndarray,
    report: RankReport | None = None,
    *,
    now: Moment,
    quiet: float = 0.0,
    first_seen: float = 0.0,
    life_since: float = 0.0,
) -> RankFacts:
    """A rank with these records, whose node's clock stands `quiet` seconds past the last thing that it did."""
    report = report or made_report()
    history = StepHistory(capacity=1024)
    history.absorb(records)
    newest = history.newest()
    last = 0 if newest is None else max(int(newest[name]) for name in ("begin_ns", "decide_ns", "end_ns"))
    clock = NodeClock(last + int(quiet * 1e9), START_UNIX + last / 1e9, now.monotonic)
    identity = report.identity
    rank = RankId(identity.dp_rank, identity.pp_rank, identity.tp_rank)
    return RankFacts(
        rank,
        rank_labels([rank])[0],
        report,
        history,
        clock,
        "http://a:9610",
        first_seen,
        life_since,
        None,
        now.monotonic,
    )


def made_engine(
    *ranks: RankFacts,
    now: Moment,
    answered: float | None = None,
    error: str = "",
    control: bool | None = True,
    token: bool = True,
    replaced: bool = False,
) -> EngineFacts:
    """An engine of these ranks, on one exporter that has just answered."""
    answered = now.monotonic if answered is None else answered
    exporter = ExporterFacts("http://a:9610", None if math.isinf(answered) else answered, error, control, token, 0.0)
    return EngineFacts("chat", ranks[0].report.identity.engine, ranks, (exporter,), replaced)
