"""
What the exporter process says over HTTP, and what it accepts.

Everything is JSON except `/v1/steps`: step records travel as they lie in the flight file, so that thousands of ranks
stay cheap. Times of records are nanoseconds of the node's monotonic clock; every answer carries that clock beside the
wall clock, so that a reader can convert without trusting the two to agree across nodes.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from rankscope_exporter.contract.words import ControlOutcome, Detail, HookState, MitigationState, RankLife, RequestIds
from rankscope_exporter.flight.layout import MAX_EFFECTIVE_STEP, MAX_GENERATION, STEP_DTYPE

METRICS_PATH = "/metrics"
RANKS_PATH = "/v1/ranks"
REQUESTS_PATH = "/v1/requests"
STEPS_PATH = "/v1/steps"
CONTROL_PATH = "/v1/control"
HEALTH_PATH = "/healthz"

STEPS_MEDIA_TYPE = "application/vnd.rankscope.steps"
STEPS_MAGIC = b"RSTEPS02"


class Message(BaseModel):
    """
    Base of all messages: immutable, and tolerant of fields that a newer peer adds.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")


class RankIdentity(Message):
    """
    Who a rank is. Fixed for the life of its process.
    """

    engine: str
    dp_rank: int
    pp_rank: int
    tp_rank: int
    pp_size: int
    tp_size: int
    dp_size: int
    global_rank: int
    host: str
    pid: int
    model: str
    vllm_version: str
    runner: str
    """`V1`, `V2` or `unknown`."""
    runner_class: str
    device: str
    async_scheduling: bool | None = None
    """None where the configuration does not say."""
    spec_method: str | None = None
    spec_tokens: int = 0
    """Draft tokens per request and step; 0 without speculation."""
    exporter_version: str
    request_ids: RequestIds = RequestIds.SHOWN
    """How this rank records request ids."""
    pid_namespace: int = 0
    """Inode of the process namespace that `pid` is a number in; 0 if unknown."""
    completes: bool = False
    """Whether this rank comes to know that a collective has completed: its calls return only then, or it asks an event."""


class HookReport(Message):
    """
    One hook point of one rank.
    """

    hook: str
    state: HookState
    reason: str = ""
    faults: dict[str, int] = {}
    """Errors of ours in it, swallowed, by the name of their class."""


class MitigationReport(Message):
    """
    Where one mitigation stands on one rank.
    """

    mitigation: str
    state: MitigationState
    reason: str = ""


class StepFailure(Message):
    """
    A step of a rank that an error of vLLM ended: the rank will not go on, and its peers wait.
    """

    step: int
    phase: int
    """The phase that the rank never left (`Phase`)."""
    method: str
    """The runner's method out of which the error came."""
    kind: str
    """The error's class. Its text is not recorded: it may hold what users wrote."""


class DeviceLengths(Message):
    """
    Lengths as the device holds them, sampled rarely and without waiting. An excess above 0 is drift.
    """

    every: int
    """Steps between two samples."""
    samples: int
    """Samples whose copy arrived; the fields below are of the last one."""
    step: int
    age_seconds: float | None
    """None if that cannot be told."""
    rows: int
    total_sum: int
    """`total_len` of the sampled rows, in tokens."""
    computed_sum: int
    excess_rows: int
    total_excess: int
    """Largest `total_len` beyond the prompt and the scheduler's output, in tokens; at most 0 if all is well."""
    computed_excess: int


class ControlReport(Message):
    """
    What a rank did with the last control word; generation 0 means that it never saw one.
    """

    requested_generation: int
    observed_generation: int
    desired: bool | None
    effective_step: int
    acted_step: int
    """Step ordinal at which the rank acted; 0 while it has not."""
    outcome: ControlOutcome


class RankReport(Message):
    """
    One rank as its flight file shows it.
    """

    key: str
    """Names the flight file; stable for the life of the rank's process."""
    identity: RankIdentity
    life: RankLife
    hooks: list[HookReport]
    mitigations: list[MitigationReport]
    control: ControlReport
    step: int
    """Ordinal of the last step that the rank began; 0 before the first."""
    phase: int
    """Phase of that step (`Phase`)."""
    in_flight_seconds: float | None
    """Age of the step in flight; None while none is."""
    last_activity_seconds: float | None
    """Age of the last thing that the rank wrote into its ring; None before its first step."""
    faults: int
    """Errors of our own, swallowed in hooks."""
    detail: Detail = Detail.FULL
    failure: StepFailure | None = None
    """The step that an error of vLLM ended; None if the rank has gone on since, or never had one."""
    device: DeviceLengths | None = None
    """None where device-side lengths are not sampled, or none has arrived yet."""
    started_unix: float
    """Wall-clock second at which the flight file was made."""


class Unreadable(Message):
    """
    A file in the flight directory that is not a flight file this exporter can read.
    """

    path: str
    reason: str


class RanksAnswer(Message):
    """
    `GET /v1/ranks`.
    """

    node: str
    exporter_version: str
    monotonic_ns: int
    unix: float
    flight_dir: str
    control: bool
    """Whether `PUT /v1/control` is on."""
    ranks: list[RankReport]
    unreadable: list[Unreadable]


class RequestRow(Message):
    """
    One request as one rank believes it, at the last step in which the rank saw it drift.
    """

    request_id: str
    state_length: int
    scheduler_length: int
    drift: int
    masked: bool
    margin: int | None = None
    """Tokens of drift that the request can still take before it is masked; None where unknown."""
    first_drift_step: int
    step: int


class RequestTable(Message):
    """
    The requests that drift most on one rank, worst first.
    """

    key: str
    engine: str
    dp_rank: int
    pp_rank: int
    tp_rank: int
    drifting: int
    """How many requests drift, also those that the bounded table has no room for."""
    rows: list[RequestRow]


class RequestsAnswer(Message):
    """
    `GET /v1/requests`.
    """

    tables: list[RequestTable]


class ControlCommand(Message):
    """
    `PUT /v1/control`: what every rank of an engine shall do, and from which step on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    mitigation: str = "trim"
    desired: bool
    generation: Annotated[int, Field(ge=1, le=MAX_GENERATION)]
    effective_step: Annotated[int, Field(ge=0, le=MAX_EFFECTIVE_STEP)]
    """First step ordinal at which the ranks act; 0 means at once (before the first step of a new engine)."""


class ControlResult(Message):
    """
    Answer to a control command: whether the word was written for every rank of the engine on this node.
    """

    accepted: bool
    reason: str = ""
    ranks: list[str] = []
    """Keys of the ranks that the word was written for."""


class StepsHeader(Message):
    """
    Head of a `/v1/steps` answer.
    """

    node: str
    monotonic_ns: int
    unix: float
    cursor: str
    """Send it back as `?cursor=` to get what comes after."""
    ranks: list["StepsRank"]


class StepsRank(Message):
    """
    The records of one rank in a `/v1/steps` answer, in the order of the body.
    """

    key: str
    engine: str
    dp_rank: int
    pp_rank: int
    tp_rank: int
    life: RankLife
    records: int
    lost: int
    """Steps between the cursor and the first record that the ring no longer holds."""


@dataclass(frozen=True, slots=True)
class StepsFrame:
    """
    A whole `/v1/steps` answer: magic, header length (u32), header (JSON), then records of `STEP_DTYPE` rank by rank.

    The last record of a rank may be of a step in flight (`phase` < DONE): it comes again, further on, next time, so
    readers replace records by step ordinal.
    """

    header: StepsHeader
    records: list[npt.NDArray[np.void]]

    def encode(self) -> bytes:
        """
        The frame as bytes.
        """
        head = self.header.model_dump_json().encode()
        return b"".join(
            [
                STEPS_MAGIC,
                struct.pack("<II", len(head), STEP_DTYPE.itemsize),
                head,
                *(r.tobytes() for r in self.records),
            ]
        )

    @classmethod
    def decode(cls, data: bytes) -> "StepsFrame":
        """
        The frame in `data`.

        Raises:
            ValueError: it is not a frame of this version, or it is cut short.

        """
        if data[:8] != STEPS_MAGIC or len(data) < 16:
            msg = "not a /v1/steps answer of this version: the exporter is older or newer than the server, upgrade the older one"
            raise ValueError(msg)
        head_length, record_bytes = struct.unpack_from("<II", data, 8)
        if record_bytes != STEP_DTYPE.itemsize or 16 + head_length > len(data):
            msg = f"step records of {record_bytes} bytes where {STEP_DTYPE.itemsize} were expected"
            raise ValueError(msg)
        header = StepsHeader.model_validate(json.loads(data[16 : 16 + head_length]))
        return cls(header, list(_split(header, data, 16 + head_length)))


def _split(header: StepsHeader, data: bytes, offset: int) -> Iterator[npt.NDArray[np.void]]:
    for rank in header.ranks:
        end = offset + rank.records * STEP_DTYPE.itemsize
        if rank.records < 0 or end > len(data):
            msg = "the answer ends before its last record"
            raise ValueError(msg)
        yield np.frombuffer(data, STEP_DTYPE, rank.records, offset)
        offset = end
