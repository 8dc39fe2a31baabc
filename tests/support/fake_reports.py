"""
Hand-made incidents and alerts for the engines of `fake_rankscope`.
"""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from fake_rankscope import ENGINES, INCIDENTS, MODEL, NOW, FakeRankscope, said
from made_ranks import ManualClock, made_engine, made_rank, made_record, made_records, made_report

from rankscope_exporter.contract import Phase
from rankscope_server.domain.alert import AlertState, AlertsView, AlertView, ReceiverView
from rankscope_server.domain.incident import CaptureView, IncidentCard, IncidentEvent, IncidentLife, IncidentView
from rankscope_server.domain.model import AuditRow, Evidence, Finding, FindingKind, RankId, Severity
from rankscope_server.incidents.capture import CaptureSubject, make_capture

BOTH = (RankId(0, 0, 0), RankId(0, 1, 0))
REQUESTS = ("cmpl-00a3f09c11d2-0", "cmpl-00a3f09c30c1-0", "cmpl-00a3f09c4fb0-0")


def found(
    kind: FindingKind,
    sentence: str,
    step: int | None,
    seconds_ago: float,
    evidence: Evidence,
    *,
    critical: bool = True,
    over: bool = False,
) -> Finding:
    """
    A finding of both ranks.
    """
    severity = Severity.CRITICAL if critical else Severity.WARNING
    since = NOW - seconds_ago
    return Finding(kind, severity, sentence, step, BOTH, since, not over, since + 0.3, evidence)


def incident(
    deployment: str,
    life: IncidentLife,
    findings: tuple[Finding, ...],
    sentence: str,
    timeline: tuple[tuple[float, str, str], ...],
    captures: tuple[CaptureView, ...] = (),
    worst: int = -1,
) -> IncidentView:
    """
    An incident, whose timeline is given in seconds before now; the finding at `worst` gives it its kind.
    """
    events = tuple(IncidentEvent(NOW - ago, what, text) for ago, what, text in timeline)
    card = IncidentCard(
        id=INCIDENTS[deployment],
        deployment=deployment,
        engine=ENGINES[deployment],
        life=life,
        kind=findings[worst].kind,
        severity=findings[worst].severity,
        sentence=sentence,
        step=findings[0].step,
        opened_unix=events[0].at_unix,
        changed_unix=events[-1].at_unix,
        closed_unix=events[-1].at_unix if life is IncidentLife.CLOSED else None,
    )
    runner, version = ("V1", "0.33.0" if deployment == "dark" else "0.27.1")
    return IncidentView(card, MODEL, version, runner, findings, events, captures)


def wedge() -> IncidentView:
    """
    A drift that became a wedge, with a copy of the records at each turn.
    """
    return incident(
        "wedge",
        IncidentLife.WEDGED,
        (
            found(
                FindingKind.DRIFT,
                "pp0 believes up to 22 more output tokens than the scheduler; drift began at step 31 with request ...11d2",
                31,
                139,
                said("+22 tokens in 8 requests", "no drift", requests=REQUESTS),
                critical=False,
                over=True,
            ),
            found(
                FindingKind.MASK_DISAGREEMENT,
                "at step 66 a request was masked on pp0 and not on pp1: its output is wrong from there",
                66,
                101,
                said("1 of 8 requests masked", "none of 8 requests masked", requests=REQUESTS[:1]),
            ),
            found(
                FindingKind.GUARD_DISAGREEMENT,
                "at step 72 pp0 decided to skip, pp1 to broadcast",
                72,
                95,
                said(
                    "skips the collective, all 8 requests masked",
                    "broadcasts, none of 8 requests masked",
                    requests=REQUESTS,
                ),
            ),
            found(
                FindingKind.WEDGED,
                "no rank advances while a step is in flight",
                72,
                93,
                said("in step 73, state updated, for 94 s", "in step 72, decided, for 94 s"),
            ),
        ),
        "pp0 stopped receiving at step 72: it believed all 8 requests were prefill; pp1 broadcast. Drift began at step 31 with request ...11d2.",
        (
            (139, "found", "drift on pp0 from step 31"),
            (138.6, "captured", "steps 1 to 31 of 2 ranks were kept"),
            (101, "worsening", "output is wrong from step 66: a request is masked on pp0 and not on pp1"),
            (100.7, "captured", "steps 1 to 66 of 2 ranks were kept"),
            (95, "found", "guard decisions differ at step 72"),
            (93, "wedged", "no rank has moved since step 72"),
            (92.4, "captured", "steps 1 to 73 of 2 ranks were kept"),
            (88, "alert fired", "RankscopeWedged was sent to pager and chat"),
        ),
        (
            CaptureView(NOW - 138.6, IncidentLife.OPEN, 2, 1, 31, 14_812),
            CaptureView(NOW - 100.7, IncidentLife.WORSENING, 2, 1, 66, 28_402),
            CaptureView(NOW - 92.4, IncidentLife.WEDGED, 2, 1, 73, 30_977),
        ),
    )


def open_drift() -> IncidentView:
    """
    A drift that goes on.
    """
    return incident(
        "baseline",
        IncidentLife.OPEN,
        (
            found(
                FindingKind.DRIFT,
                "pp0 believes up to 37 more output tokens than the scheduler, on 6 of 8 requests",
                371,
                40,
                said("+37 tokens in 6 requests", "no drift", requests=REQUESTS),
                critical=False,
            ),
        ),
        "pp0 believes up to 37 more output tokens than the scheduler. Drift began at step 371 with request ...11d2.",
        ((40, "found", "drift on pp0 from step 371"), (39.6, "captured", "steps 1 to 373 of 2 ranks were kept")),
        (CaptureView(NOW - 39.6, IncidentLife.OPEN, 2, 1, 373, 148_120),),
    )


def recovered_drift() -> IncidentView:
    """
    A drift that the trim fix ended.
    """
    return incident(
        "canary",
        IncidentLife.RECOVERED,
        (
            found(
                FindingKind.DRIFT,
                "pp0 believed up to 12 more output tokens than the scheduler; drift began at step 371 with request ...4fb0",
                371,
                335,
                said("+12 tokens in 3 requests", "no drift", requests=REQUESTS[2:]),
                critical=False,
                over=True,
            ),
        ),
        "Drift on pp0 from step 371, up to 12 tokens. The trim fix was turned on at step 396; drift ended there.",
        (
            (335, "found", "drift on pp0 from step 371"),
            (334.5, "captured", "steps 1 to 372 of 2 ranks were kept"),
            (309, "fix on", "the trim fix was turned on by mira; every rank acted at step 396"),
            (306, "over", "drift has ended at step 398"),
            (301, "recovered", "nothing of it holds any more"),
        ),
        (CaptureView(NOW - 334.5, IncidentLife.OPEN, 2, 1, 372, 147_903),),
    )


def blind_spot() -> IncidentView:
    """
    An engine that is not seen.
    """
    return incident(
        "dark",
        IncidentLife.OPEN,
        (
            found(
                FindingKind.BLIND,
                "the exporter at http://10.0.4.17:9610 does not answer: connection refused",
                None,
                47,
                Evidence(),
                critical=False,
            ),
        ),
        "Not seen: the exporter at http://10.0.4.17:9610 does not answer. What the ranks do meanwhile is not known.",
        ((47, "found", "the exporter at http://10.0.4.17:9610 does not answer"),),
    )


def equal_stall() -> IncidentView:
    """
    A stall of ranks that agree, long over.
    """
    return incident(
        "steady",
        IncidentLife.CLOSED,
        (
            found(
                FindingKind.STALLED,
                "step 9041 was in flight for 48 s on both ranks; no disagreement is known",
                9041,
                6267,
                said("in step 9041, scheduled, for 48 s", "in step 9041, scheduled, for 48 s"),
                critical=False,
                over=True,
            ),
        ),
        "Both ranks stood still in step 9041 for 48 s. They agreed: no disagreement is known.",
        (
            (6267, "found", "step 9041 takes longer than it may"),
            (6266.6, "captured", "steps 8018 to 9041 of 2 ranks were kept"),
            (6228, "recovered", "the ranks move again from step 9042"),
            (6108, "closed", "nothing came back for 120 s"),
        ),
        (CaptureView(NOW - 6266.6, IncidentLife.OPEN, 2, 8018, 9041, 402_118),),
    )


ALL_INCIDENTS = (wedge, open_drift, recovered_drift, blind_spot, equal_stall)


def alert(
    name: str,
    deployment: str,
    summary: str,
    state: AlertState = AlertState.FIRING,
    severity: Severity = Severity.CRITICAL,
    *,
    ago: float = 60.0,
    **changes: object,
) -> AlertView:
    """
    An alert about an engine, whose condition came to hold so many seconds ago.
    """
    engine = ENGINES.get(deployment, "")
    plain = AlertView(
        name=name,
        deployment=deployment,
        engine=engine,
        state=state,
        severity=severity,
        summary=summary,
        pending_unix=NOW - ago,
        fired_unix=None if state is AlertState.PENDING else NOW - ago,
        resolved_unix=NOW - ago / 2 if state is AlertState.RESOLVED else None,
        page=f"/deployments/{deployment}/engines/{engine}",
        runbook=f"/runbooks/{name}",
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def receiver(name: str, kind: str, where: str, **changes: object) -> ReceiverView:
    """
    A receiver that was never used, with changes.
    """
    plain = ReceiverView(name, kind, where, None, "", 0, 0, 0, None, None)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def alerts() -> AlertsView:
    """
    Every state of alerts and receivers.
    """
    warning = Severity.WARNING
    return AlertsView(
        active=(
            alert(
                "RankscopeWedged",
                "wedge",
                "no rank advances while a step is in flight",
                ago=93,
                incident=INCIDENTS["wedge"],
            ),
            alert("RankscopeGuardDisagreement", "wedge", "at step 72 pp0 decided to skip, pp1 to broadcast", ago=95),
            alert("RankscopeDrift", "baseline", "drift on pp0 from step 371", severity=warning, ago=40),
            alert(
                "RankscopeReceiverFailing",
                "",
                "receiver chat does not take alerts",
                severity=warning,
                page="/alerts",
                runbook="",
            ),
            alert("RankscopeForecast", "baseline", "a wedge is in sight", AlertState.PENDING, warning, ago=3),
        ),
        past=(
            alert("RankscopeDrift", "canary", "drift on pp0 from step 371", AlertState.RESOLVED, warning, ago=335),
            alert(
                "RankscopeStalled", "steady", "step 9041 was in flight for 48 s", AlertState.RESOLVED, warning, ago=6267
            ),
        ),
        receivers=(
            receiver(
                "pager",
                "alertmanager",
                "http://alertmanager-1:9093, http://alertmanager-2:9093",
                healthy=True,
                delivered=14,
                last_delivered_unix=NOW - 5,
            ),
            receiver(
                "chat",
                "webhook",
                "https://hooks.example.org/rankscope",
                healthy=False,
                error="answered 401 Unauthorized: check secret_file, its key is not the one that the receiver has",
                delivered=6,
                waiting=3,
                given_up=1,
                last_delivered_unix=NOW - 5400,
                failing_since_unix=NOW - 4980,
            ),
            receiver("mail", "apprise", "mailtos://***@mail.example.org"),
        ),
    )


@cache
def flight_records() -> bytes:
    """
    A capture of an engine whose ranks part at step 30.
    """
    now = ManualClock().now()
    first = np.concatenate([made_records(1, 29), made_record(30, masked=8, drift_max=20)])
    second = np.concatenate([made_records(1, 29), made_record(30, Phase.DECIDED)])
    ranks = (made_rank(first, made_report(0), now=now), made_rank(second, made_report(1), now=now))
    view = wedge()
    subject = CaptureSubject(
        made_engine(*ranks, now=now), view.card.id, view.card.life, view.card.sentence, view.findings
    )
    with ThreadPoolExecutor(1) as pool:  # A thread of its own has no event loop that is running.
        return pool.submit(asyncio.run, make_capture(subject, now)).result().data


def fill(fake: FakeRankscope) -> None:
    """
    Put all of it in place.
    """
    for make in ALL_INCIDENTS:
        view = make()
        fake.report(view)
        for number in range(len(view.captures)):
            fake.captures[view.card.id, number] = flight_records()
    fake.rows += [
        AuditRow(
            NOW - 310,
            "mira",
            "canary",
            ENGINES["canary"],
            "turned the trim fix on",
            "generation 3, step 396",
            "applied at step 396 on pp0, pp1",
        ),
    ]
    fake.alert(alerts())
