"""
One saved flight file: who its rank was, what it said of itself, its steps, and what is known about the copy.
"""

from dataclasses import dataclass

from pydantic import ValidationError

from rankscope_exporter.contract import (
    Detail,
    DeviceLengths,
    HookReport,
    MitigationReport,
    Phase,
    RankIdentity,
    RankLife,
    RankReport,
    RequestTable,
    StepFailure,
)
from rankscope_exporter.flight import FlightError, FlightFile
from rankscope_exporter.flight.reporting import control_report, last_failure, mitigation_reports, request_table
from rankscope_server.domain.history import Records
from rankscope_server.domain.model import RankId
from rankscope_server.replay.errors import ReplayError
from rankscope_server.replay.places import SavedFile

MAX_UNIX, MAX_NS = float(1 << 33), 1 << 60
"""
The year 2242, and a node that has been up for 36 years: no clock shows more.
"""


@dataclass(frozen=True, slots=True, eq=False)
class SavedRank:
    """
    What a saved flight file holds. Its times are nanoseconds of its node's monotonic clock.
    """

    file: SavedFile
    report: RankReport
    """As of the end. Its `life` says RUNNING: what is known of the process is not in the file."""
    records: Records
    created_unix: float
    """The node's clocks at one moment: wall clock, in seconds,"""
    created_ns: int
    """and monotonic clock."""
    pid: int
    process_start_ticks: int
    """0: unknown."""
    requests: RequestTable | None = None
    """The requests that drifted most at the end; None where the table is damaged."""
    device_ns: int | None = None
    """When the last sample of device-side lengths was taken; None where there is none."""

    @property
    def identity(self) -> RankIdentity:
        """Who the rank was."""
        return self.report.identity

    @property
    def id(self) -> RankId:
        """Where it stood in its engine."""
        return RankId(self.identity.dp_rank, self.identity.pp_rank, self.identity.tp_rank)


def read_saved(file: SavedFile) -> SavedRank:
    """
    Read a saved flight file.

    Raises:
        ReplayError: it is no flight file, of another version, cut short, or damaged where it says whose it is.

    """
    try:
        with FlightFile(file.path) as flight:
            identity = RankIdentity.model_validate(flight.identity())
            return _read(file, flight, identity)
    except FlightError as error:
        raise ReplayError(f"{file.shown}: {str(error).removeprefix(f'{file.path.name}: ')}") from error
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        msg = f"{file.shown}: does not say whose it is, or not in words that are known here: {field}: {error.errors()[0]['msg']}"
        raise ReplayError(msg) from error


def _check_clocks(flight: FlightFile) -> None:
    """
    Refuse a file whose clocks make no sense: nothing in it could be dated.
    """
    if not 0 < flight.created_unix < MAX_UNIX or flight.created_monotonic_ns > MAX_NS:
        msg = "its header says when it was made, and that makes no sense: the file is damaged"
        raise FlightError(msg)


def _read(file: SavedFile, flight: FlightFile, identity: RankIdentity) -> SavedRank:
    _check_clocks(flight)
    raw = flight.report()
    hooks = [HookReport.model_validate(hook) for hook in raw.get("hooks", [])]
    mitigations = [MitigationReport.model_validate(m) for m in raw.get("mitigations", [])]
    told = raw.get("failure")
    control = flight.control()
    records = flight.records()
    newest = records[-1] if len(records) else None
    step = flight.step()
    device, device_ns = _device(flight)
    report = RankReport(
        key=flight.key,
        identity=identity,
        life=RankLife.RUNNING,
        hooks=hooks,
        mitigations=list(mitigation_reports(mitigations, control)),
        control=control_report(control),
        step=step,
        phase=int(newest["phase"]) if newest is not None and newest["step"] == step else Phase.WRITING,
        in_flight_seconds=None,
        last_activity_seconds=None,
        faults=flight.faults(),
        detail=Detail(flight.detail()),
        failure=_failure(flight, None if told is None else StepFailure.model_validate(told)),
        device=device,
        started_unix=flight.created_unix,
    )
    return SavedRank(
        file=file,
        report=report,
        records=records,
        created_unix=flight.created_unix,
        created_ns=flight.created_monotonic_ns,
        pid=flight.pid,
        process_start_ticks=flight.process_start_ticks,
        requests=_requests(flight, identity),
        device_ns=device_ns,
    )


def _failure(flight: FlightFile, told: StepFailure | None) -> StepFailure | None:
    """
    How the rank's last step failed; None if it did not.
    """
    _, failed = flight.failed_steps()
    return last_failure(flight, failed, told) if failed == flight.step() else None


def _device(flight: FlightFile) -> tuple[DeviceLengths | None, int | None]:
    """
    The last sample of device-side lengths, and when it was taken; its age is told by whoever knows what time it is.
    """
    raw = flight.device_lengths()
    if raw is None or not raw["samples"]:
        return None, None
    names = ("every", "samples", "step", "rows", "total_sum", "computed_sum", "excess_rows", "total_excess")
    values = {name: int(raw[name]) for name in (*names, "computed_excess")}
    return DeviceLengths(age_seconds=None, **values), int(raw["taken_ns"])


def _requests(flight: FlightFile, identity: RankIdentity) -> RequestTable | None:
    try:
        return request_table(flight, identity)
    except FlightError:
        return None
