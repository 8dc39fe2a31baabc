"""
What came of the runs: one value per run, from which the figures are made. Nothing here waits or talks to anybody.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from figures import Figures

SETTLED_SECONDS, FORESIGHT_SECONDS = 2.0, 1.0
"""
Forecasts are judged from so long after traffic took its last form until so long before the ranks parted.
"""
DELAY_GOAL = "<= 1"


@dataclass(frozen=True, slots=True)
class BaselineVerdict:
    """
    One run whose ranks parted; times are wall-clock seconds, None where something did not come.
    """

    number: int
    acceptance: float
    parted_step: int | None
    """First guard disagreement, as the flight files have it."""
    decided_unix: float | None
    """When the second rank decided about that step."""
    drifting_unix: float | None
    """When the first step with drift began."""
    findings: dict[str, dict[str, Any]]
    finding_unix: float | None
    drift_alert_unix: float | None
    guard_alert_unix: float | None
    page_unix: float | None
    loose_unix: float | None
    """When traffic took its last form; None where it stopped."""
    forecasts: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """When each was seen, and what it said."""

    @property
    def found(self) -> bool:
        """Whether the wedge was found, at the right step."""
        guard = self.findings.get("guard disagreement", {})
        return self.parted_step is not None and guard.get("step") == self.parted_step and "wedged" in self.findings

    @property
    def drifting_seconds(self) -> float | None:
        """From the first drift to the decision that parted the ranks: no lead can be longer."""
        return _span(self.drifting_unix, self.decided_unix)

    @property
    def lead_seconds(self) -> float | None:
        """From the alert about drift to the decision that parted the ranks."""
        return _span(self.drift_alert_unix, self.decided_unix)

    @property
    def judged(self) -> list[tuple[float, dict[str, Any]]]:
        """Forecasts that speak of the traffic that parted the ranks, one a second: how long before, and what they said."""
        if self.decided_unix is None or self.loose_unix is None:
            return []
        judged: list[tuple[float, dict[str, Any]]] = []
        for seen_unix, forecast in self.forecasts:
            before = self.decided_unix - seen_unix
            if seen_unix < self.loose_unix + SETTLED_SECONDS or before < FORESIGHT_SECONDS:
                continue
            if not judged or judged[-1][0] - before >= 1.0:
                judged.append((before, forecast))
        return judged

    def delay(self, heard_unix: float | None) -> float | None:
        """
        Seconds from the second rank's decision.
        """
        return _span(self.decided_unix, heard_unix)


def _span(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(end - begin, 3)


def report_baseline(figures: Figures, verdicts: Sequence[BaselineVerdict]) -> None:
    """
    The figures of all runs whose ranks parted.
    """
    count = len(verdicts)
    missed = {v.number: sorted(v.findings) for v in verdicts if not v.found}
    steps = {str(v.number): v.parted_step for v in verdicts}
    acceptances = [v.acceptance for v in verdicts]
    found = sum(v.found for v in verdicts)
    figures.report("wedges_found", found, f"= {count}", steps=steps, acceptance=acceptances, missed=missed)
    leads = [v.lead_seconds for v in verdicts]
    figures.report("lead_positive", sum(lead is not None and lead > 0 for lead in leads), f"= {count}", seconds=leads)
    drifting = [v.drifting_seconds for v in verdicts]
    figures.report(
        "drift_seconds_least", min((d for d in drifting if d is not None), default=None), "> 0", seconds=drifting
    )
    told = [_span(v.drifting_unix, v.drift_alert_unix) for v in verdicts]
    seen = [_span(v.drifting_unix, v.findings.get("drift", {}).get("found_unix")) for v in verdicts]
    heard_of = [delay for delay in told if delay is not None]
    figures.report(
        "seconds_to_drift_alert_median",
        round(statistics.median(heard_of), 3) if heard_of else None,
        "",
        seconds=told,
        findings=seen,
    )
    known = [lead for lead in leads if lead is not None]
    figures.report("lead_seconds_median", statistics.median(known) if known else None, "> 0")
    figures.report("lead_seconds_least", min(known, default=None), "> 0")
    for where in ("finding", "alertmanager", "page"):
        delays = [v.delay(_heard(v, where)) for v in verdicts]
        heard = [delay for delay in delays if delay is not None]
        complete = len(heard) == count
        figures.report(f"seconds_to_{where}_median", round(statistics.median(heard), 3) if heard else None, DELAY_GOAL)
        worst = max(heard) if complete and heard else None
        figures.report(f"seconds_to_{where}_worst", worst, DELAY_GOAL, seconds=delays)
    report_forecasts(figures, verdicts)


def _heard(verdict: BaselineVerdict, where: str) -> float | None:
    return {
        "finding": verdict.finding_unix,
        "alertmanager": verdict.guard_alert_unix,
        "page": verdict.page_unix,
    }[where]


def report_forecasts(figures: Figures, verdicts: Sequence[BaselineVerdict]) -> None:
    """
    How many forecasts were an interval that held. They speak of traffic that goes on as it does: runs in which it stops
    have none that could be judged.
    """
    judged = {str(v.number): v.judged for v in verdicts if v.judged}
    held = [holds(before, forecast) for forecasts in judged.values() for before, forecast in forecasts]
    share = round(sum(held) / len(held), 3) if held else None
    told = {number: [_told(before, forecast) for before, forecast in some] for number, some in judged.items()}
    figures.report("forecasts_held", share, "", forecasts=len(held), runs=len(judged), told=told)


def holds(before: float, forecast: dict[str, Any]) -> bool:
    """
    Whether a forecast was an interval in which the ranks parted, so many seconds later.
    """
    earliest, latest = forecast["earliest_seconds"], forecast["latest_seconds"]
    return earliest is not None and latest is not None and bool(earliest <= before <= latest)


def _told(before: float, forecast: dict[str, Any]) -> str:
    interval = forecast["outlook"]
    if forecast["earliest_seconds"] is not None:
        interval = f"{forecast['earliest_seconds']:.1f} to {forecast['latest_seconds']:.1f} s"
    return f"{before:.1f} s before: {interval} ({forecast['reason']})"


@dataclass(frozen=True, slots=True)
class HealthyVerdict:
    """
    One run that nothing is wrong with.
    """

    name: str
    steps: int
    findings: list[str]
    """Sentences of findings of any kind, open or over."""
    alerts: list[str]
    """Names of alerts at Alertmanager."""


def report_healthy(figures: Figures, name: str, verdicts: Sequence[HealthyVerdict]) -> None:
    """
    The figures of runs that nothing is wrong with.
    """
    figures.report(f"{name}_runs", len(verdicts), "> 0", steps=[v.steps for v in verdicts])
    figures.report(f"{name}_steps_least", min((v.steps for v in verdicts), default=0), "> 0")
    findings = {v.name: v.findings for v in verdicts if v.findings}
    figures.report(f"{name}_findings", sum(map(len, findings.values())), "= 0", findings=findings)
    alerts = {v.name: v.alerts for v in verdicts if v.alerts}
    figures.report(f"{name}_alerts", sum(map(len, alerts.values())), "= 0", alerts=alerts)
