"""
What a flight file holds, in the messages of the contract: for whoever answers over HTTP, and whoever reads a saved file.

Not imported by the package itself: the worker has no use for it.
"""

from collections.abc import Sequence

from rankscope_exporter.contract import (
    ControlReport,
    Mitigation,
    MitigationReport,
    Phase,
    RankIdentity,
    RequestRow,
    RequestTable,
    StepFailure,
)
from rankscope_exporter.flight.areas import Control
from rankscope_exporter.flight.layout import decode_control
from rankscope_exporter.flight.reader import FlightFile

_MITIGATIONS = {int(mitigation): mitigation.name.lower() for mitigation in Mitigation}


def control_report(control: Control) -> ControlReport:
    """
    The control area in the words of the contract.
    """
    _, requested, effective_step, desired = decode_control(control.requested_word)
    _, observed, _, _ = decode_control(control.observed_word)
    return ControlReport(
        requested_generation=requested,
        observed_generation=observed,
        desired=desired if control.requested_word else None,
        effective_step=effective_step,
        acted_step=control.acted_step,
        outcome=control.outcome,
    )


def mitigation_reports(reports: Sequence[MitigationReport], control: Control) -> tuple[MitigationReport, ...]:
    """
    The mitigations as they stand: the rank writes what it installed once, and the state after each action elsewhere.
    """
    if not control.acted_word:
        return tuple(reports)
    acted = _MITIGATIONS.get(decode_control(control.acted_word)[0])
    return tuple(
        report.model_copy(update={"state": control.mitigation_state}) if report.mitigation == acted else report
        for report in reports
    )


def last_failure(flight: FlightFile, step: int, reported: StepFailure | None) -> StepFailure | None:
    """
    How `step` failed, the last one that an error of vLLM ended; None if it is 0, as there was none.

    A rank says of its first failures how they came about. Of later ones only step and phase are known.
    """
    if not step or (reported is not None and reported.step == step):
        return reported if step else None
    records = flight.records(after=step - 1)
    phase = int(records[0]["phase"]) if len(records) and records[0]["step"] == step else int(Phase.WRITING)
    return StepFailure(step=step, phase=phase, method="unknown", kind="unknown")


def request_table(flight: FlightFile, identity: RankIdentity) -> RequestTable:
    """
    The requests that drift most.

    Raises:
        FlightError: the table is damaged or half written.

    """
    drifting, rows = flight.requests()
    return RequestTable(
        key=flight.key,
        engine=identity.engine,
        dp_rank=identity.dp_rank,
        pp_rank=identity.pp_rank,
        tp_rank=identity.tp_rank,
        drifting=drifting,
        rows=[
            RequestRow(
                request_id=row.request_id,
                state_length=row.state_length,
                scheduler_length=row.scheduler_length,
                drift=row.drift,
                masked=row.masked,
                margin=row.margin,
                first_drift_step=row.first_drift_step,
                step=row.step,
            )
            for row in rows
        ],
    )
