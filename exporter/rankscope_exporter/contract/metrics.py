"""
Every metric that the exporter process serves: the one table from which collectors, documentation and tests take them.

A sample that would say something unknown is left out; it is never 0 instead.
"""

from dataclasses import dataclass
from typing import Literal

from rankscope_exporter.flight.layout import OWN_TIME_STEPS

RANK_LABELS = ("engine", "dp_rank", "pp_rank", "tp_rank")
"""
Labels of every metric of a rank.
"""

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """
    One metric; `name` is the name as Prometheus stores it (a counter's with `_total`).
    """

    name: str
    kind: Kind
    subject: str
    """The collector that serves it."""
    unit: str
    """Base unit, or empty for states and plain numbers."""
    help: str
    labels: tuple[str, ...] = ()
    """Labels besides those of the rank."""
    per_rank: bool = True

    @property
    def all_labels(self) -> tuple[str, ...]:
        """All labels, those of the rank first."""
        return (*RANK_LABELS, *self.labels) if self.per_rank else self.labels

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names of its samples."""
        return (
            tuple(self.name + suffix for suffix in ("_bucket", "_count", "_sum"))
            if self.kind == "histogram"
            else (self.name,)
        )


RANK_INFO = MetricSpec(
    "rankscope_rank_info", "gauge", "rank", "", "Who the rank is; always 1.",
    ("pp_size", "tp_size", "dp_size", "global_rank", "host", "pid", "model", "vllm_version", "runner", "runner_class", "device",
     "async_scheduling", "spec_method", "spec_tokens", "exporter_version"),
)  # fmt: skip
RANK_LIFE = MetricSpec(
    "rankscope_rank_life", "gauge", "rank", "",
    "1 for the state that the rank's process is in (running, stopped by a signal, gone, unknown), 0 for the others; "
    "unknown: it is in another process namespace than the exporter.", ("life",),
)  # fmt: skip
RANK_STARTED = MetricSpec(
    "rankscope_rank_start_timestamp_seconds", "gauge", "rank", "seconds", "Wall-clock time at which the rank made its flight file.",
)  # fmt: skip
STEPS = MetricSpec(
    "rankscope_steps_total", "counter", "rank", "", "Steps that the rank began; the last step's ordinal."
)
STEP_PHASE = MetricSpec(
    "rankscope_step_phase", "gauge", "rank", "",
    "Last phase that the rank entered in its last step: 1 scheduled, 2 state updated, 3 decided, 4 done.",
)  # fmt: skip
STEP_IN_FLIGHT = MetricSpec(
    "rankscope_step_in_flight",
    "gauge",
    "rank",
    "",
    "1 while a step is in flight, 0 while none is, also after a step that failed.",
)
STEP_IN_FLIGHT_AGE = MetricSpec(
    "rankscope_step_in_flight_seconds", "gauge", "rank", "seconds", "Age of the step in flight; absent while none is.",
)  # fmt: skip
STEP_BEGIN = MetricSpec(
    "rankscope_step_begin_timestamp_seconds", "gauge", "rank", "seconds", "Wall-clock time at which the last step began.",
)  # fmt: skip
LAST_ACTIVITY = MetricSpec(
    "rankscope_last_activity_timestamp_seconds", "gauge", "rank", "seconds",
    "Wall-clock time at which the rank last began, decided or ended a step.",
)  # fmt: skip

SCHEDULED_REQUESTS = MetricSpec(
    "rankscope_scheduled_requests", "gauge", "batch", "requests",
    "Requests that the scheduler named in the last step, by kind: new (first time), cached (known to the rank), finished.", ("kind",),
)  # fmt: skip
SCHEDULED_TOKENS = MetricSpec(
    "rankscope_scheduled_tokens", "gauge", "batch", "tokens", "Tokens scheduled in the last step, drafts included."
)
SPECULATIVE = MetricSpec(
    "rankscope_speculative_requests",
    "gauge",
    "batch",
    "requests",
    "Requests that were scheduled with draft tokens in the last step.",
)
BATCH_REQUESTS = MetricSpec(
    "rankscope_batch_requests", "gauge", "batch", "requests",
    "Rows of the batch when the rank last decided; absent if the last step came to no decision.",
)  # fmt: skip

LENGTHS_BASIS = MetricSpec(
    "rankscope_lengths_basis", "gauge", "lengths", "",
    "1 for what lengths and drift of the last step count: output tokens as the rank caches them (V1), computed tokens as it keeps them on "
    "the host (V2), or unknown, if they were not read.", ("basis",),
)  # fmt: skip
STATE_LENGTH = MetricSpec(
    "rankscope_request_state_length_tokens", "histogram", "lengths", "tokens",
    "Request-state length of each request, sampled every few steps; rankscope_lengths_basis says what it counts.",
)  # fmt: skip
SCHEDULER_LENGTH = MetricSpec(
    "rankscope_scheduler_length_tokens", "histogram", "lengths", "tokens",
    "The scheduler's length of each request, sampled at the same steps.",
)  # fmt: skip
LENGTH_SAMPLES = MetricSpec(
    "rankscope_length_samples_total", "counter", "lengths", "", "Steps that were sampled into the histograms of lengths.",
)  # fmt: skip
STATE_SUM = MetricSpec(
    "rankscope_step_request_state_length_sum_tokens", "gauge", "lengths", "tokens",
    "Request-state lengths of the last step, summed over its cached requests.",
)  # fmt: skip
STATE_MAX = MetricSpec(
    "rankscope_step_request_state_length_max_tokens", "gauge", "lengths", "tokens", "Largest request-state length of the last step.",
)  # fmt: skip
SCHEDULER_SUM = MetricSpec(
    "rankscope_step_scheduler_length_sum_tokens", "gauge", "lengths", "tokens",
    "The scheduler's lengths of the last step, summed over its cached requests.",
)  # fmt: skip
SCHEDULER_MAX = MetricSpec(
    "rankscope_step_scheduler_length_max_tokens", "gauge", "lengths", "tokens", "The scheduler's largest length of the last step.",
)  # fmt: skip

DRIFT_SUM = MetricSpec(
    "rankscope_drift_sum_tokens", "gauge", "drift", "tokens",
    "Drift of the last step (request-state length minus the scheduler's), summed over its cached requests.",
)  # fmt: skip
DRIFT_MAX = MetricSpec(
    "rankscope_drift_max_tokens",
    "gauge",
    "drift",
    "tokens",
    "Largest drift of a request in the last step; more than 0 is wrong.",
)
DRIFTING = MetricSpec(
    "rankscope_drifting_requests", "gauge", "drift", "requests", "Requests with drift of more than 0 in the last step."
)

MASKED = MetricSpec(
    "rankscope_masked_requests", "gauge", "mask", "requests",
    "Requests of the last step whose sampled token the rank does not use: it is discarded (V1) or not needed (V2); absent if the mask is not known.",
)  # fmt: skip
MASK_KNOWN = MetricSpec(
    "rankscope_mask_known", "gauge", "mask", "", "1 if the mask was read in the last step that came to a decision, 0 if it was not.",
)  # fmt: skip

GUARD_BROADCASTS = MetricSpec(
    "rankscope_guard_broadcasts_total", "counter", "guard", "", "Guard decisions of the kind broadcast: the sampled-token collective takes place.",
)  # fmt: skip
GUARD_SKIPS = MetricSpec(
    "rankscope_guard_skips_total", "counter", "guard", "", "Guard decisions of the kind skip: all requests were masked."
)
GUARD_LAST = MetricSpec(
    "rankscope_guard_decision", "gauge", "guard", "",
    "1 for the guard decision of the last step that got as far: broadcast, skip, or none.", ("decision",),
)  # fmt: skip

COLLECTIVES_POSTED = MetricSpec(
    "rankscope_collectives_posted_total", "counter", "collectives", "",
    "Collectives that the rank posted for the exchange of sampled tokens: one a step on V1, two or, with drafts, three on V2.",
)  # fmt: skip
COLLECTIVES_COMPLETED = MetricSpec(
    "rankscope_collectives_completed_total", "counter", "collectives", "",
    "Collectives of the exchange known to have completed; absent where nothing tells, as calls return earlier on GPUs and only V2 receivers ask an event.",
)  # fmt: skip
STEP_POSTED = MetricSpec(
    "rankscope_step_posted_collectives", "gauge", "collectives", "collectives",
    "Collectives of the exchange that the rank posted in the last step that came to a decision, so far if it is in flight; 0 if it skipped.",
)  # fmt: skip
COLLECTIVE_WIDTH = MetricSpec(
    "rankscope_collective_width_columns", "gauge", "collectives", "columns",
    "Columns of the last sampled-token collective as the rank posts it; absent if not known.",
)  # fmt: skip
COLLECTIVE_ROLE = MetricSpec(
    "rankscope_collective_role", "gauge", "collectives", "", "1 for the rank's side of its last sampled-token collective: sender or receiver.",
    ("role",),
)  # fmt: skip
QUEUE_SLOTS = MetricSpec(
    "rankscope_receive_queue_slots", "gauge", "collectives", "slots",
    "Slots of the queue in which the rank keeps what it received until it is used; absent where it has no queue (V1, and the last rank).",
)  # fmt: skip
QUEUE_FILLED = MetricSpec(
    "rankscope_receive_queue_filled_slots", "gauge", "collectives", "slots",
    "Of these slots, those that waited to be used in the last step, before its own receive.",
)  # fmt: skip
DROPPED_ROWS = MetricSpec(
    "rankscope_dropped_rows_total", "counter", "collectives", "rows",
    "Received rows that the rank did not use because their request was freed meanwhile; absent where it has no queue.",
)  # fmt: skip

MITIGATION_STATE = MetricSpec(
    "rankscope_mitigation_state", "gauge", "mitigation", "",
    "1 for the state of the mitigation on the rank (available, applied, not applicable, unknown code), 0 for the others.", ("mitigation", "state"),
)  # fmt: skip
CONTROL_REQUESTED = MetricSpec(
    "rankscope_control_requested_generation", "gauge", "mitigation", "", "Generation of the control word that was written for the rank; 0: none yet.",
)  # fmt: skip
CONTROL_OBSERVED = MetricSpec(
    "rankscope_control_observed_generation", "gauge", "mitigation", "", "Generation of the control word that the rank saw last; 0: none yet.",
)  # fmt: skip
CONTROL_DESIRED = MetricSpec(
    "rankscope_control_desired", "gauge", "mitigation", "", "1 if the control word wants the mitigation on, 0 if off; absent without a word.",
)  # fmt: skip
CONTROL_EFFECTIVE = MetricSpec(
    "rankscope_control_effective_step", "gauge", "mitigation", "",
    "Step ordinal at which the control word takes effect, 0: at once; absent without a word.",
)  # fmt: skip
CONTROL_ACTED = MetricSpec(
    "rankscope_control_acted_step", "gauge", "mitigation", "", "Step ordinal at which the rank last acted on a control word; absent before.",
)  # fmt: skip
CONTROL_OUTCOME = MetricSpec(
    "rankscope_control_outcome", "gauge", "mitigation", "",
    "1 for what the rank did with its last control word: none, pending, applied, applied late, refused, failed.", ("outcome",),
)  # fmt: skip
TRIMMED_TOKENS = MetricSpec(
    "rankscope_trimmed_tokens_total", "counter", "mitigation", "tokens",
    "Tokens that the trim fix took off the rank's request state; absent where there is nothing to trim (V2).",
)  # fmt: skip

DEVICE_SAMPLES = MetricSpec(
    "rankscope_device_samples_total", "counter", "device", "",
    "Samples of device-side lengths that arrived (V2); absent, like all of these, where RANKSCOPE_DEVICE_LENGTHS_STEPS is 0.",
)  # fmt: skip
DEVICE_STEP = MetricSpec(
    "rankscope_device_sample_step", "gauge", "device", "", "Step ordinal at which the last sample was taken."
)
DEVICE_AGE = MetricSpec(
    "rankscope_device_sample_age_seconds", "gauge", "device", "seconds", "Time since the last sample was taken."
)
DEVICE_REQUESTS = MetricSpec(
    "rankscope_device_sample_requests", "gauge", "device", "requests", "Requests in the last sample."
)
DEVICE_TOTAL_SUM = MetricSpec(
    "rankscope_device_total_length_sum_tokens", "gauge", "device", "tokens",
    "Prompt and output tokens (total_len) of the sampled requests as the device holds them, summed.",
)  # fmt: skip
DEVICE_COMPUTED_SUM = MetricSpec(
    "rankscope_device_computed_length_sum_tokens", "gauge", "device", "tokens",
    "Computed tokens (num_computed_tokens) of the sampled requests as the device holds them, summed.",
)  # fmt: skip
DEVICE_EXCESS_REQUESTS = MetricSpec(
    "rankscope_device_excess_requests", "gauge", "device", "requests",
    "Sampled requests that are longer on the device than the scheduler said at that step: they drift.",
)  # fmt: skip
DEVICE_TOTAL_EXCESS = MetricSpec(
    "rankscope_device_total_length_excess_tokens", "gauge", "device", "tokens",
    "Largest total_len of a sampled request beyond its prompt and the scheduler's output; more than 0 is wrong, less is tokens under way.",
)  # fmt: skip
DEVICE_COMPUTED_EXCESS = MetricSpec(
    "rankscope_device_computed_length_excess_tokens", "gauge", "device", "tokens",
    "Largest num_computed_tokens of a sampled request beyond the scheduler's; more than 0 is wrong.",
)  # fmt: skip

FAILED_STEPS = MetricSpec(
    "rankscope_failed_steps_total", "counter", "failures", "", "Steps that an error of vLLM ended on the rank."
)
STEP_FAILED = MetricSpec(
    "rankscope_step_failed", "gauge", "failures", "",
    "1 if an error of vLLM ended the rank's last step, so that its peers wait for it; 0 if not.",
)  # fmt: skip
FAILED_STEP = MetricSpec(
    "rankscope_failed_step", "gauge", "failures", "", "Ordinal of the last step that an error of vLLM ended; absent if there was none.",
)  # fmt: skip
FAILURE_INFO = MetricSpec(
    "rankscope_failed_step_info", "gauge", "failures", "",
    "How that step ended: the phase that it never left (scheduled, state updated, decided), the method that raised and the error's class, unknown "
    "where not recorded; always 1.", ("phase", "method", "kind"),
)  # fmt: skip

BLIND = MetricSpec(
    "rankscope_rank_blind", "gauge", "blind", "",
    "1 if something of the rank cannot be seen for this reason, 0 if not: hook off, hook absent, hook removed (it failed too often), unknown code, over "
    "budget (less is recorded), lengths unknown (the last step's were not read), life unknown. Alert on any 1.", ("reason",),
)  # fmt: skip

HOOK_ON = MetricSpec(
    "rankscope_hook_on", "gauge", "hooks", "", "1 if the hook sees its code, 0 if it is absent, off or removed, for the given reason.",
    ("hook", "state", "reason"),
)  # fmt: skip
HOOK_FAULTS = MetricSpec(
    "rankscope_hook_faults_total", "counter", "hooks", "",
    "Errors of Rankscope's own that a hook swallowed, by the class of the error; brought up to date at its first, second, fourth, eighth ... error.",
    ("hook", "kind"),
)  # fmt: skip

FAULTS = MetricSpec(
    "rankscope_faults_total", "counter", "own", "", "Errors of Rankscope's own that its hooks swallowed."
)
OWN_TIME = MetricSpec(
    "rankscope_own_step_seconds", "histogram", "own", "seconds",
    f"Time that Rankscope's hooks took in a step, measured in one step of {OWN_TIME_STEPS}.",
)  # fmt: skip
DETAIL = MetricSpec(
    "rankscope_detail_level", "gauge", "own", "",
    "1 for what the rank still records, 0 for the others: full, reduced (over the budget of own time: no request table, no histograms of lengths), "
    "cut (the hook that cost most is off as well).", ("level",),
)  # fmt: skip

EXPORTER_INFO = MetricSpec(
    "rankscope_exporter_info", "gauge", "node", "", "The exporter process; always 1.", ("node", "version", "flight_dir"), per_rank=False,
)  # fmt: skip
FLIGHT_FILES = MetricSpec(
    "rankscope_flight_files", "gauge", "node", "files",
    "Flight files of the node by state: readable, unreadable, superseded (a later process of the same rank has one).", ("state",), per_rank=False,
)  # fmt: skip
CONTROL_ENABLED = MetricSpec(
    "rankscope_control_enabled", "gauge", "node", "", "1 if this exporter takes control commands, 0 if no token is set.", per_rank=False,
)  # fmt: skip

NCCL_RAS_UP = MetricSpec(
    "rankscope_nccl_ras_up", "gauge", "nccl", "",
    "1 if NCCL's RAS port answered the last question and the answer was understood, 0 if not; absent if the NCCL view is off.",
    ("address",), per_rank=False,
)  # fmt: skip
NCCL_RAS_AGE = MetricSpec(
    "rankscope_nccl_ras_answer_age_seconds", "gauge", "nccl", "seconds", "Time since the last answer that was understood; absent before the first.",
    ("address",), per_rank=False,
)  # fmt: skip
NCCL_RAS_FAILURES = MetricSpec(
    "rankscope_nccl_ras_failures_total", "counter", "nccl", "",
    "Questions to NCCL's RAS port that brought nothing: refused, unreachable, timeout, closed, cut short, too large, unknown format, fault.",
    ("address", "reason"), per_rank=False,
)  # fmt: skip
NCCL_INFO = MetricSpec(
    "rankscope_nccl_info", "gauge", "nccl", "", "The NCCL that answers and the format that it answered in (json, text); always 1.",
    ("address", "nccl_version", "format"), per_rank=False,
)  # fmt: skip
NCCL_COMMUNICATORS = MetricSpec(
    "rankscope_nccl_communicators", "gauge", "nccl", "", "NCCL communicators by status and errors, in NCCL's words.",
    ("address", "status", "errors"), per_rank=False,
)  # fmt: skip
NCCL_LEFT_OUT = MetricSpec(
    "rankscope_nccl_left_out_ranks", "gauge", "nccl", "ranks", "Ranks of communicators that are not shown one by one because there are too many.",
    ("address",), per_rank=False,
)  # fmt: skip
NCCL_COMMUNICATOR_STATE = MetricSpec(
    "rankscope_nccl_communicator_state", "gauge", "nccl", "",
    "1 for the state of the communicator (equal, mismatch, frozen mismatch, incomplete, error), 0 for the others.",
    ("address", "communicator", "state"), per_rank=False,
)  # fmt: skip
NCCL_COMMUNICATOR_AGE = MetricSpec(
    "rankscope_nccl_communicator_age_seconds", "gauge", "nccl", "seconds", "Time since the answer that last spoke of the communicator.",
    ("address", "communicator"), per_rank=False,
)  # fmt: skip
NCCL_COMMUNICATOR_RANKS = MetricSpec(
    "rankscope_nccl_communicator_ranks", "gauge", "nccl", "ranks", "Ranks of the communicator, missing ones included.",
    ("address", "communicator"), per_rank=False,
)  # fmt: skip
NCCL_COMMUNICATOR_MISSING = MetricSpec(
    "rankscope_nccl_communicator_missing_ranks", "gauge", "nccl", "ranks", "Ranks of the communicator of which NCCL has no data.",
    ("address", "communicator"), per_rank=False,
)  # fmt: skip
NCCL_COMMUNICATOR_UNCHANGED = MetricSpec(
    "rankscope_nccl_communicator_unchanged_seconds", "gauge", "nccl", "seconds",
    "Time for which the communicator's counts had not changed when NCCL last answered; absent where counts are not told.",
    ("address", "communicator"), per_rank=False,
)  # fmt: skip
NCCL_COUNT_SPREAD = MetricSpec(
    "rankscope_nccl_communicator_count_spread", "gauge", "nccl", "",
    "Highest minus lowest number of collectives of a type that the communicator's ranks launched.",
    ("address", "communicator", "collective"), per_rank=False,
)  # fmt: skip
NCCL_COLLECTIVES = MetricSpec(
    "rankscope_nccl_collectives_total", "counter", "nccl", "",
    "Collectives of a type that a rank of a communicator launched, as NCCL counts them; launched is not completed.",
    ("address", "communicator", "nccl_rank", "host", "pid", "cuda_device", "collective"), per_rank=False,
)  # fmt: skip
NCCL_RANK_STATE = MetricSpec(
    "rankscope_nccl_rank_state", "gauge", "nccl", "",
    "1 for the state of a rank of a communicator: init, running, finalize, abort, unresponsive, dead, not a member; other states are absent.",
    ("address", "communicator", "nccl_rank", "host", "pid", "cuda_device", "state"), per_rank=False,
)  # fmt: skip
NCCL_RANK_ERROR = MetricSpec(
    "rankscope_nccl_rank_error", "gauge", "nccl", "", "1 for an error of a rank of a communicator, of kind init or async; absent without one.",
    ("address", "communicator", "nccl_rank", "host", "pid", "cuda_device", "kind", "result"), per_rank=False,
)  # fmt: skip

COLLECTOR_SUCCESS = MetricSpec(
    "rankscope_collector_success", "gauge", "collector", "", "1 if the collector worked in this scrape; if 0, its metrics are missing.",
    ("collector",), per_rank=False,
)  # fmt: skip
COLLECTOR_FAILURES = MetricSpec(
    "rankscope_collector_failures_total", "counter", "collector", "",
    "Scrapes in which the collector failed, by the class of the error; each class is logged once. Absent before the first.",
    ("collector", "kind"), per_rank=False,
)  # fmt: skip
COLLECTOR_DURATION = MetricSpec(
    "rankscope_collector_duration_seconds", "gauge", "collector", "seconds", "Time that the collector took in this scrape.",
    ("collector",), per_rank=False,
)  # fmt: skip

METRICS: tuple[MetricSpec, ...] = tuple(value for value in dict(globals()).values() if isinstance(value, MetricSpec))
"""
All of them, in the order above.
"""


def markdown() -> str:
    """
    `docs/metrics.md`, made from the table.
    """
    lines = [
        "# Metrics",
        "",
        "<!-- Generated by `rankscope-exporter metrics-doc`; a test keeps it true. Change `rankscope_exporter/contract/metrics.py` instead. -->",
        "",
        "Served by `rankscope-exporter` on `/metrics`. Metrics of a rank have the labels " + ", ".join(f"`{label}`" for label in RANK_LABELS) + ";",
        "what is not known is left out, never 0. `?engine=`, `?dp_rank=`, `?pp_rank=`, `?tp_rank=` and `?name[]=` choose what is served.",
        "Gauges \"of the last step\" keep their value while the engine is idle: `rankscope_last_activity_timestamp_seconds` says how old they are.",
    ]  # fmt: skip
    subject = ""
    for spec in METRICS:
        if spec.subject != subject:
            subject = spec.subject
            lines += [
                "",
                f"## {subject}",
                "",
                "| Metric | Type | Unit | Labels | Meaning |",
                "| --- | --- | --- | --- | --- |",
            ]
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        if spec.per_rank:
            labels = f"rank + {labels}" if labels else "rank"
        lines.append(f"| `{spec.name}` | {spec.kind} | {spec.unit} | {labels} | {spec.help} |")
    return "\n".join(lines) + "\n"
