"""
The read model: what pages and API show. Built by pure functions from what was polled, rendered by `web`.

A value that is not known is None, and pages say so; nothing here turns "unknown" into a zero.
"""

import enum
from dataclasses import dataclass, field

from rankscope_server.domain.outlook import UNFORESEEN, Forecast


class DeploymentRole(str, enum.Enum):
    """
    What a deployment is for.
    """

    BASELINE = "baseline"
    CANARY = "canary"
    NONE = "none"


class State(enum.IntEnum):
    """
    The state of an engine or a deployment, worst last: `max` of several is the one to show.
    """

    HEALTHY = 0
    IDLE = 1
    """No step for a while and none in flight: nothing to judge."""
    BLIND = 2
    """Something that should be seen is not: hooks off, unknown code, exporter not reached, old data."""
    DRIFTING = 3
    STALLED = 4
    """A step is in flight for longer than its limit, and no disagreement is known."""
    MITIGATION_MIXED = 5
    """Some ranks have the trim fix and some do not: their request state parts from here on."""
    OUTPUT_WRONG = 6
    """Masked requests differ between ranks: their output is wrong from here on."""
    PARTED = 7
    """Guard decisions (or batches, or widths) differ at the same step: a wedge is near."""
    RANK_LOST = 8
    """A process is gone or stopped, or a step of it failed, while its peers wait."""
    WEDGED = 9

    @property
    def label(self) -> str:
        """The state in words, as pages and API show it."""
        return self.name.lower().replace("_", " ")


class FindingKind(str, enum.Enum):
    """
    The kinds of finding; `docs/architecture.md` has the rule behind each.
    """

    DRIFT = "drift"
    MASK_DISAGREEMENT = "mask disagreement"
    GUARD_DISAGREEMENT = "guard disagreement"
    WIDTH_MISMATCH = "width mismatch"
    BATCH_MISMATCH = "batch mismatch"
    WEDGED = "wedged"
    STALLED = "stalled"
    RANK_LOST = "rank lost"
    MITIGATION_MIXED = "mitigation mixed"
    BLIND = "blind"


class Severity(str, enum.Enum):
    """
    How loud a finding is.
    """

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class RankId:
    """
    A rank within its engine.
    """

    dp_rank: int
    pp_rank: int
    tp_rank: int

    @property
    def label(self) -> str:
        """Full name; pages use the shorter one that still tells the ranks of an engine apart."""
        return f"dp{self.dp_rank} pp{self.pp_rank} tp{self.tp_rank}"


@dataclass(frozen=True, slots=True)
class RankValue:
    """
    What one rank said at the step of a finding, in words: `skips the collective, 6 of 6 requests masked`.
    """

    rank: RankId
    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """
    What a finding rests on: the word of each rank concerned, and the requests, where they are known.
    """

    values: tuple[RankValue, ...] = ()
    requests: tuple[str, ...] = ()
    """Ids of requests concerned, worst first (of drift: longest first), at most eight; empty where it is not known which."""
    began_with: str = ""
    """Of drift: the request with which it began, which may have ended since; empty where that is not known."""


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Something that is wrong with an engine, with its evidence.
    """

    kind: FindingKind
    severity: Severity
    sentence: str
    """What a tired person reads: which rank did what, at which step."""
    step: int | None
    """First step at which it was so; None where it has no step (blind, rank lost before its first step)."""
    ranks: tuple[RankId, ...]
    since_unix: float
    open: bool = True
    """False once it no longer holds; disagreements never close for the life of the engine."""
    found_unix: float | None = None
    """When the server found it; `since_unix` is when it came to be, by the clock of the node."""
    evidence: Evidence = Evidence()


@dataclass(frozen=True, slots=True)
class RankView:
    """
    One rank of an engine.
    """

    id: RankId
    label: str
    key: str
    life: str
    step: int
    phase: str
    in_flight_seconds: float | None
    steps_per_second: float | None
    drift_max: int | None
    drifting: int | None
    requests: int | None
    masked: int | None
    guard: str
    last_did: str
    """The last thing that this rank did, in words: what is left when it hangs or is gone."""
    hooks: tuple["HookView", ...]
    fix_state: str
    fix_reason: str
    faults: int
    pid: int
    host: str
    failed: bool = False
    """Whether its last step ended in an error of vLLM; `last_did` says how."""
    host_lengths: "HostLengths | None" = None
    """Request lengths as a V2 rank keeps them on the host; None on other runners, and where they are unknown."""
    device: "DeviceView | None" = None
    """Its last sample of device-side lengths; None where none is taken."""
    exchange: "ExchangeView | None" = None
    """Its side of the sampled-token exchange; None on other runners than V2, and before its first decision."""
    queue: "QueueView | None" = None
    """Its receive queue; None where it has none."""


@dataclass(frozen=True, slots=True)
class HostLengths:
    """
    Computed tokens of the cached requests of a V2 rank's newest step: copies of what the scheduler says, in tokens.
    """

    total: int
    largest: int
    beyond: int
    """Largest difference to the scheduler's; 0 as long as they are copies of it."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """
    Lengths as a V2 rank's device holds them, sampled rarely and without waiting; in tokens.
    """

    step: int
    age_seconds: float | None
    """None where it is not known."""
    every: int
    """Steps between two samples."""
    rows: int
    excess_rows: int
    """Requests of which more is held than the scheduler allows."""
    total_excess: int
    """Largest `total_len` beyond that; at most 0 if all is well."""
    computed_excess: int


@dataclass(frozen=True, slots=True)
class ExchangeView:
    """
    The sampled-token exchange of a rank's newest decided step, and since the start.
    """

    step: int
    width: int | None
    """Columns as the rank posts them; None where it does not know, or skips."""
    posted: int
    """Collectives that it posted in that step."""
    posted_total: int
    completed_total: int | None
    """None where the rank does not come to know of completions."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """
    What a V2 rank has received and not used yet.
    """

    depth: int
    filled: int
    dropped_total: int
    """Received rows that were not used, as their request was freed since."""


@dataclass(frozen=True, slots=True)
class HookView:
    """
    One hook of a rank.
    """

    hook: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class StripCell:
    """
    A guard decision of one rank at one step.
    """

    step: int
    guard: str
    """`broadcast`, `skip`, `none` (no decision yet) or `missing` (no record)."""
    masked: int | None
    requests: int | None
    drift_max: int | None
    differs: bool
    """Whether another rank of the engine decided otherwise at this step."""


@dataclass(frozen=True, slots=True)
class Strip:
    """
    Guard decisions, rank by step: the rows are ranks, in order, over the same steps.
    """

    steps: tuple[int, ...]
    rows: tuple[tuple[str, tuple[StripCell, ...]], ...]


@dataclass(frozen=True, slots=True)
class RequestView:
    """
    A request that drifts on a rank.
    """

    request_id: str
    rank: str
    state_length: int
    scheduler_length: int
    drift: int
    masked: bool
    margin: int | None
    first_drift_step: int


@dataclass(frozen=True, slots=True)
class ToggleProgress:
    """
    How far the ranks of an engine have come with the last toggle.
    """

    desired: bool
    generation: int
    effective_step: int
    acknowledged: int
    ranks: int
    per_rank: tuple[tuple[str, str], ...]
    """Rank label and what it did: `pending, acts at step 412`, `applied at step 412`, ..."""
    applied_step_spread: int | None
    """Largest difference of the steps at which ranks acted; None until all have."""


@dataclass(frozen=True, slots=True)
class FixView:
    """
    The trim fix on an engine, and whether it can be toggled.
    """

    state: str
    """`applied`, `available`, `not applicable`, `unknown code`, `mixed` or `unknown`."""
    desired: bool | None
    """What the operators asked for; None if nobody ever did."""
    can_turn_on: bool
    can_turn_off: bool
    refusal: str
    """Why it cannot be toggled, and what to do instead; empty if it can."""
    progress: ToggleProgress | None
    last_actor: str | None
    last_changed_unix: float | None


@dataclass(frozen=True, slots=True)
class AuditRow:
    """
    One thing that somebody did.
    """

    at_unix: float
    actor: str
    deployment: str
    engine: str
    action: str
    detail: str
    outcome: str


@dataclass(frozen=True, slots=True)
class EngineView:
    """
    Everything that the engine page shows.
    """

    deployment: str
    role: DeploymentRole
    engine: str
    model: str
    vllm_version: str
    runner: str
    state: State
    headline: str
    data_age_seconds: float | None
    """Age of the newest answer of its exporters; None if there never was one."""
    findings: tuple[Finding, ...]
    ranks: tuple[RankView, ...]
    strip: Strip
    requests: tuple[RequestView, ...]
    fix: FixView
    audit: tuple[AuditRow, ...]
    ended: bool = False
    """Whether every process of the engine is gone: what is shown is what it did last."""
    unknown_code: str = ""
    """What is seen and what is not of ranks that run code which Rankscope does not know; empty if all is known."""
    drift_unknown: str = ""
    """Why no drift can be shown, with the remedy; empty where it can."""
    requests_unknown: str = ""
    """Why it is not known which requests drift; empty where it is."""
    acted: tuple["ActedMark", ...] = ()
    """When the trim fix was turned on or off, oldest first."""
    forecast: Forecast = UNFORESEEN
    incident: str = ""
    """Id of the incident that is open on it; empty if none is."""


@dataclass(frozen=True, slots=True)
class ActedMark:
    """
    The step at which the ranks of an engine acted on a toggle.
    """

    generation: int
    desired: bool
    step: int
    at_unix: float
    """When the step began, by the clock of the node."""


@dataclass(frozen=True, slots=True)
class EngineCard:
    """
    An engine on the fleet page.
    """

    engine: str
    state: State
    ranks: tuple[tuple[str, int | None], ...]
    """Rank label and its largest drift."""
    steps_per_second: float | None
    headline: str
    fix_state: str
    ended: bool = False
    forecast: Forecast = UNFORESEEN
    incident: str = ""
    """Id of the incident that is open on it; empty if none is."""


@dataclass(frozen=True, slots=True)
class DeploymentCard:
    """
    A deployment on the fleet page.
    """

    name: str
    role: DeploymentRole
    model: str
    vllm_version: str
    runner: str
    state: State
    headline: str
    data_age_seconds: float | None
    engines: tuple[EngineCard, ...]
    sparkline: tuple[float | None, ...]
    """Largest drift of the deployment, once a second, oldest first; None where nothing was known."""
    fix_state: str
    problems: tuple[str, ...] = ()
    """Exporters that cannot be reached or understood, each with the remedy."""
    unknown_code: str = ""
    """As for an engine, of the first one that runs such code; empty if none does."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """
    Everything that the fleet page shows.
    """

    now_unix: float
    deployments: tuple[DeploymentCard, ...]
    problems: tuple[str, ...] = ()
    """What is wrong with the server itself (its store cannot be written, ...), each with the remedy."""


@dataclass(frozen=True, slots=True)
class Series:
    """
    Drift per rank over time, as uPlot wants it: one list of times, one of values per rank.
    """

    times_unix: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    values: list[list[float | None]] = field(default_factory=list)
