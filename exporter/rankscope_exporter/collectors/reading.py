"""
One rank as its flight file shows it at one moment: what every collector and every answer is made of.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope_exporter.collectors.labels import Labels
from rankscope_exporter.contract import (
    ControlReport,
    Detail,
    DeviceLengths,
    HookReport,
    Mitigation,
    MitigationReport,
    MitigationState,
    Phase,
    RankIdentity,
    RankLife,
    StepFailure,
)
from rankscope_exporter.contract.metrics import RANK_INFO, RANK_LABELS
from rankscope_exporter.flight import FlightFile, Snapshot
from rankscope_exporter.flight.reader import OwnTime
from rankscope_exporter.flight.reporting import control_report, last_failure, mitigation_reports

LOOK_BACK = (2, 64)
"""
How many of the newest records are looked at for the newest one that has each part, before the whole ring is: usually
the last one is done, or in flight after one that is done.
"""

_PHASES = tuple(Phase)
_DONE = int(Phase.DONE)


@dataclass(frozen=True, slots=True)
class Parts:
    """
    For each part of a step record, the newest record that has it; None where none in the ring has.

    A record in flight has only the parts up to its phase. Taking each part from the newest record that has it keeps
    counters from going backwards while a step is under way.
    """

    begun: np.void | None
    state: np.void | None
    decided: np.void | None
    done: np.void | None


@dataclass(frozen=True, slots=True)
class RankReading:
    """
    One rank: identity, life, the newest of each part of its records, control, hooks and histograms.
    """

    key: str
    identity: RankIdentity
    labels: Labels
    """`engine, dp_rank, pp_rank, tp_rank`."""
    info: Labels
    """The same, and the whole identity."""
    life: RankLife
    created_unix: float
    step: int
    parts: Parts
    control: ControlReport
    hooks: tuple[HookReport, ...]
    mitigations: tuple[MitigationReport, ...]
    histograms: Snapshot
    own_time: OwnTime
    device: DeviceLengths | None
    """None where device-side lengths are not sampled; `samples` is 0 before the first has arrived."""
    detail: Detail
    failed_steps: int
    """Steps that an error of vLLM ended."""
    failure: StepFailure | None
    """The last of them, whatever the rank did since."""
    faults: int
    monotonic_ns: int
    """The node's clocks when this was read."""
    unix: float

    @property
    def last(self) -> np.void | None:
        """The record of the last step that was begun; None if there is none, or while it is being written."""
        begun = self.parts.begun
        return begun if begun is not None and int(begun["step"]) == self.step else None

    @property
    def phase(self) -> Phase:
        """How far the rank has come in its last step."""
        return _PHASES[0 if (last := self.last) is None else int(last["phase"])]

    @property
    def failed(self) -> bool:
        """Whether an error of vLLM ended the rank's last step."""
        return self.failure is not None and self.failure.step == self.step

    @property
    def in_flight(self) -> bool:
        """Whether its last step is in flight: it is neither done nor failed."""
        last = self.last
        return last is not None and bool(last["phase"] != _DONE) and not self.failed

    @property
    def in_flight_seconds(self) -> float | None:
        """Age of the step in flight; None while none is, or while that is not known."""
        last = self.last
        return self._age(int(last["begin_ns"])) if last is not None and self.in_flight else None

    @property
    def begin_unix(self) -> float | None:
        """Wall-clock second at which the last step began; None if that is not known."""
        begun = self.parts.begun
        if begun is None or (age := self._age(int(begun["begin_ns"]))) is None:
            return None
        return round(self.unix - age, 3)

    @property
    def measured(self) -> np.void | None:
        """The newest record that reached the request state, if its lengths were read; None while they are unknown."""
        state = self.parts.state
        return state if state is not None and state["lengths"] else None

    @property
    def last_activity_seconds(self) -> float | None:
        """Age of the last thing that the rank wrote into its ring; None before its first step."""
        begun = self.parts.begun
        if begun is None:
            return None
        return self._age(max(int(begun["begin_ns"]), int(begun["decide_ns"]), int(begun["end_ns"])))

    def _age(self, since_ns: int) -> float | None:
        return age_seconds(since_ns, self.monotonic_ns)


def age_seconds(since_ns: int, monotonic_ns: int) -> float | None:
    """
    Time since `since_ns`; None if that is no time of this clock: a file copied from another machine, or kept over a boot.
    """
    return (monotonic_ns - since_ns) / 1e9 if 0 < since_ns <= monotonic_ns else None


def newest_parts(records: npt.NDArray[np.void]) -> Parts:
    """
    The newest record that has each part, out of records in the order of their steps.
    """
    found: list[np.void | None] = [None, None, None, None]
    phases = records["phase"].tolist()
    reached = 0
    for index in range(len(phases) - 1, -1, -1):
        while reached < phases[index]:
            found[reached] = records[index]
            reached += 1
        if reached == _DONE:
            break
    return Parts(*found)


def read_parts(file: FlightFile) -> Parts:
    """
    The newest record that has each part, as the ring of `file` holds them.
    """
    step = file.step()
    for count in LOOK_BACK:
        parts = newest_parts(file.records(after=max(step - count, 0)))
        if parts.done is not None or step <= count:
            return parts
    return newest_parts(file.records())


def device_lengths(file: FlightFile, monotonic_ns: int) -> DeviceLengths | None:
    """
    The last sample of device-side lengths; None where none are taken, or while one is being written.
    """
    raw = file.device_lengths()
    if raw is None:
        return None
    return DeviceLengths(
        every=int(raw["every"]),
        samples=int(raw["samples"]),
        step=int(raw["step"]),
        age_seconds=age_seconds(int(raw["taken_ns"]), monotonic_ns),
        rows=int(raw["rows"]),
        total_sum=int(raw["total_sum"]),
        computed_sum=int(raw["computed_sum"]),
        excess_rows=int(raw["excess_rows"]),
        total_excess=int(raw["total_excess"]),
        computed_excess=int(raw["computed_excess"]),
    )


@dataclass(frozen=True, slots=True)
class Reports:
    """
    What a rank says of itself in words.
    """

    hooks: tuple[HookReport, ...] = ()
    mitigations: tuple[MitigationReport, ...] = ()
    failure: StepFailure | None = None


class RankMemo:
    """
    What is kept of one flight file from one reading to the next, as it does not change or rarely does.
    """

    def __init__(self, identity: RankIdentity) -> None:
        self.identity = identity
        self.labels = Labels({name: str(getattr(identity, name)) for name in RANK_LABELS})
        self.info = self.labels.more(**{name: _text(getattr(identity, name)) for name in RANK_INFO.labels})
        self._raw: dict[str, Any] | None = None
        self._reports = Reports()

    def reports(self, file: FlightFile) -> Reports:
        """
        Reports of hooks, mitigations and the last failed step as they stand in `file`, parsed anew only when the rank wrote new ones.

        Raises:
            FlightError: the area is damaged.
            ValueError: it is JSON, but no report.

        """
        raw = file.report()
        if raw is not self._raw:
            hooks = tuple(HookReport.model_validate(hook) for hook in raw.get("hooks", []))
            mitigations = tuple(MitigationReport.model_validate(m) for m in raw.get("mitigations", []))
            failure = raw.get("failure")
            self._reports = Reports(
                hooks, mitigations, None if failure is None else StepFailure.model_validate(failure)
            )
            self._raw = raw
        return self._reports


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_rank(file: FlightFile, memo: RankMemo, life: RankLife, *, monotonic_ns: int, unix: float) -> RankReading:
    """
    Read everything about one rank, but not its table of requests.

    Raises:
        FlightError: an area of the file is damaged.
        ValueError: a report in it is not one.

    """
    control = file.control()
    reports = memo.reports(file)
    failed_steps, failed_step = file.failed_steps()
    return RankReading(
        key=file.key,
        identity=memo.identity,
        labels=memo.labels,
        info=memo.info,
        life=life,
        created_unix=file.created_unix,
        step=file.step(),
        parts=read_parts(file),
        control=control_report(control),
        hooks=reports.hooks,
        mitigations=mitigation_reports(reports.mitigations, control),
        histograms=file.histograms(),
        own_time=file.own_time(),
        device=device_lengths(file, monotonic_ns),
        detail=file.detail(),
        failed_steps=failed_steps,
        failure=last_failure(file, failed_step, reports.failure),
        faults=file.faults(),
        monotonic_ns=monotonic_ns,
        unix=unix,
    )


def state_of(reading: RankReading, mitigation: Mitigation) -> MitigationState | None:
    """
    Where `mitigation` stands on a rank; None if the rank does not report it.
    """
    name = mitigation.name.lower()
    return next((report.state for report in reading.mitigations if report.mitigation == name), None)


def current(readings: list[RankReading]) -> list[RankReading]:
    """
    One reading per rank: where a rank left the file of an earlier process behind, the later file stands for it.
    """
    newest: dict[str, RankReading] = {}
    for reading in readings:
        rank = reading.labels.text
        if rank not in newest or _precedence(newest[rank]) < _precedence(reading):
            newest[rank] = reading
    return list(newest.values())


def _precedence(reading: RankReading) -> tuple[bool, float]:
    return reading.life is not RankLife.GONE, reading.created_unix
