"""
A frozen copy of the flight records of an engine, out of the server's memory: a zip file that opens anywhere later.

It outlives the engine, its node and its flight files. Records are copied rank by rank between two turns of the event loop,
and packed in a thread.
"""

import io
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from anyio import to_thread
from pydantic import TypeAdapter

from rankscope_exporter.contract import ControlReport, DeviceLengths, Mitigation, RankReport, RequestTable
from rankscope_exporter.contract import RequestRow as ContractRow
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.composing import compose_flight
from rankscope_exporter.flight.writer import RequestRow
from rankscope_server.domain.clock import Moment, NodeClock
from rankscope_server.domain.facts import EngineFacts, RankFacts, plain_url
from rankscope_server.domain.history import Records
from rankscope_server.domain.incident import CaptureView, IncidentLife
from rankscope_server.domain.model import Finding
from rankscope_server.incidents.manifest import (
    MANIFEST_NAME,
    CaptureClock,
    CaptureExporter,
    CaptureManifest,
    CaptureRank,
    file_name,
)

STEPS_KEPT = 1024
"""
Newest steps of each rank that a capture holds.
"""

BATCH = 8
"""
Ranks whose records are copied in one turn of the event loop: a few milliseconds.
"""

MAX_NS = (1 << 63) - 1

LEVEL = 3
"""
How hard deflate works: harder makes files a twentieth smaller, and takes a third longer.
"""

EARLIEST_UNIX = 315_532_800.0
"""
1980: files in a zip cannot be older.
"""

FINDINGS: TypeAdapter[tuple[Finding, ...]] = TypeAdapter(tuple[Finding, ...])


@dataclass(frozen=True, slots=True)
class CaptureSubject:
    """
    What a capture is of, beside the records themselves.
    """

    engine: EngineFacts
    incident: str
    life: IncidentLife
    sentence: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """
    A capture that was made.
    """

    view: CaptureView
    data: bytes


@dataclass(frozen=True, slots=True)
class FrozenRank:
    """
    One rank at one moment; nothing in it changes any more.
    """

    label: str
    report: RankReport
    requests: RequestTable | None
    clock: NodeClock
    exporter: str
    records: Records
    age_seconds: float


class _Packer:
    """
    The zip file under way. Only one thread at a time works on it.
    """

    def __init__(self, at_unix: float) -> None:
        self.ranks: list[CaptureRank] = []
        self.names: set[str] = set()
        self._buffer = io.BytesIO()
        self._archive = zipfile.ZipFile(self._buffer, "w")
        self._date = datetime.fromtimestamp(max(at_unix, EARLIEST_UNIX), UTC).timetuple()[:6]

    def add(self, ranks: Sequence[FrozenRank]) -> None:
        """
        Pack some ranks. One that does not fit into a flight file is left out, and the manifest says why.
        """
        for rank in ranks:
            name, problem = file_name(rank.report.key, self.names), ""
            try:
                self._write(name, compose_rank(rank))
                self.names.add(name)
            except (ValueError, OverflowError) as error:
                name, problem = "", str(error)
            self.ranks.append(_describe(rank, name, problem))

    def finish(self, manifest: CaptureManifest) -> bytes:
        """
        The whole file.
        """
        self._write(MANIFEST_NAME, manifest.model_dump_json(indent=1).encode())
        self._archive.close()
        return self._buffer.getvalue()

    def _write(self, name: str, data: bytes) -> None:
        info = zipfile.ZipInfo(name, self._date)
        info.external_attr = 0o600 << 16
        self._archive.writestr(info, data, zipfile.ZIP_DEFLATED, LEVEL)


async def make_capture(subject: CaptureSubject, now: Moment) -> Capture:
    """
    Copy what is held of an engine, and pack it.

    Ranks are copied some milliseconds apart: what aligns their records is the step, not the moment of the copy.
    """
    packer = _Packer(now.unix)
    ranks = subject.engine.ranks
    for first in range(0, len(ranks), BATCH):
        await to_thread.run_sync(packer.add, [freeze_rank(rank, now) for rank in ranks[first : first + BATCH]])
    manifest = CaptureManifest(
        format=1,
        deployment=subject.engine.deployment,
        engine=subject.engine.engine,
        incident=subject.incident,
        life=subject.life,
        captured_unix=now.unix,
        sentence=subject.sentence,
        ranks=tuple(packer.ranks),
        missing_ranks=subject.engine.missing,
        missing_exporters=tuple(
            CaptureExporter(url=plain_url(exporter.url), error=exporter.error)
            for exporter in subject.engine.exporters
            if exporter.out_of_reach(now)
        ),
        findings=tuple(FINDINGS.dump_python(subject.findings, mode="json")),
    )
    data = await to_thread.run_sync(packer.finish, manifest)
    steps = [step for rank in packer.ranks for step in (rank.first_step, rank.last_step) if step]
    view = CaptureView(
        at_unix=now.unix,
        life=subject.life,
        ranks=len(packer.names),
        first_step=min(steps, default=0),
        last_step=max(steps, default=0),
        size_bytes=len(data),
    )
    return Capture(view, data)


def freeze_rank(rank: RankFacts, now: Moment) -> FrozenRank:
    """
    A copy of what is held of a rank.
    """
    return FrozenRank(
        label=rank.label,
        report=rank.report,
        requests=rank.requests,
        clock=rank.clock,
        exporter=plain_url(rank.exporter),
        records=rank.history.tail(STEPS_KEPT),
        age_seconds=max(0.0, now.monotonic - rank.clock.received),
    )


def compose_rank(rank: FrozenRank) -> bytes:
    """
    The flight file of a rank, as small as its records allow.

    Raises:
        ValueError: something of it does not fit into a flight file.

    """
    report = rank.report
    created_ns = _created_ns(rank)
    device = None if report.device is None else _device_fields(report.device, rank)
    table = rank.requests
    return compose_flight(
        report.identity.model_dump(mode="json"),
        {
            "hooks": [hook.model_dump(mode="json") for hook in report.hooks],
            "mitigations": [mitigation.model_dump(mode="json") for mitigation in report.mitigations],
            "failure": None if report.failure is None else report.failure.model_dump(mode="json"),
        },
        rank.records,
        created_unix=rank.clock.unix_of(created_ns),
        created_monotonic_ns=created_ns,
        pid=report.identity.pid,
        table=() if table is None else [_table_row(row) for row in table.rows],
        drifting=0 if table is None else table.drifting,
        control=_control_words(report),
        faults=report.faults,
        detail=report.detail,
        device=device,
    )


def _created_ns(rank: FrozenRank) -> int:
    """
    When its flight file was made, by the monotonic clock of its node; no later than its first record.

    That pair of clocks dates every record. It goes by what the clocks said last: a wall clock that was set since is followed.
    """
    made = rank.clock.monotonic_ns - round((rank.clock.unix - rank.report.started_unix) * 1e9)
    first = int(rank.records["begin_ns"].min()) if len(rank.records) else made
    return max(0, min(made, first))


def _last_ns(records: Records) -> int:
    """
    The last thing that the records tell of, in nanoseconds; 0 if there are none.
    """
    if len(records) == 0:
        return 0
    return max(int(records[-1][name]) for name in ("begin_ns", "decide_ns", "end_ns"))


def _describe(rank: FrozenRank, name: str, problem: str) -> CaptureRank:
    identity, records = rank.report.identity, rank.records
    # What an exporter reads while it answers can be a little newer than the clock in its answer.
    ns = min(max(rank.clock.monotonic_ns, _last_ns(records), 0), MAX_NS)
    unix = rank.clock.unix_of(ns)
    return CaptureRank(
        file=name,
        key=rank.report.key,
        label=rank.label,
        dp_rank=identity.dp_rank,
        pp_rank=identity.pp_rank,
        tp_rank=identity.tp_rank,
        life=rank.report.life,
        clock=CaptureClock(monotonic_ns=ns, unix=unix if math.isfinite(unix) else 0.0),
        age_seconds=rank.age_seconds,
        exporter=rank.exporter,
        first_step=int(records["step"][0]) if len(records) else 0,
        last_step=int(records["step"][-1]) if len(records) else 0,
        problem=problem,
    )


def _table_row(row: ContractRow) -> RequestRow:
    request = row.request_id.encode()[: layout.REQUEST_ID_BYTES]
    margin = layout.MARGIN_UNKNOWN if row.margin is None else row.margin
    return (
        row.step, row.first_drift_step, row.state_length, row.scheduler_length, row.drift, margin, row.masked, len(request), request,
    )  # fmt: skip


def _device_fields(device: DeviceLengths, rank: FrozenRank) -> dict[str, int]:
    names = (
        "every", "samples", "step", "total_sum", "computed_sum", "rows", "excess_rows", "total_excess", "computed_excess",
    )  # fmt: skip
    fields = {name: int(getattr(device, name)) for name in names}
    age = device.age_seconds
    return fields | ({} if age is None else {"taken_ns": max(0, rank.clock.monotonic_ns - round(age * 1e9))})


def _control_words(report: RankReport) -> Sequence[int]:
    words = [0] * (layout.ACK_STATE + 1)
    control = report.control
    words[layout.CONTROL_REQUEST] = _control_word(control, control.requested_generation)
    words[layout.ACK_OBSERVED] = _control_word(control, control.observed_generation)
    words[layout.ACK_WORD] = words[layout.ACK_OBSERVED] if control.acted_step else 0
    words[layout.ACK_STEP] = control.acted_step
    words[layout.ACK_OUTCOME] = int(control.outcome)
    trim = next((mitigation.state for mitigation in report.mitigations if mitigation.mitigation == "trim"), 0)
    words[layout.ACK_STATE] = int(trim)
    return words


def _control_word(control: ControlReport, generation: int) -> int:
    """
    A control word by what is known of it; 0 if there was none.
    """
    if generation == 0:
        return 0
    return layout.encode_control(Mitigation.TRIM, generation, control.effective_step, desired=bool(control.desired))
