"""
What a receiver is told about an alert.
"""

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from rankscope_server.domain.alert import AlertView
from rankscope_server.domain.alert_life import Alert, Change, Transition
from rankscope_server.domain.alert_rules import BY_KIND, RULES, labelled_kind
from rankscope_server.domain.model import Severity

SOURCE = "rankscope-server"
"""
Label that tells these alerts from those of rules for Prometheus with the same names.
"""

FORECAST_OVER = "Nothing is foreseen any more: the drift is over, or the ranks have parted, of which other alerts tell."
"""
What the end of a forecast means.
"""


@dataclass(frozen=True, slots=True)
class Notice:
    """
    One change of an alert, for one or more receivers. `id` is the same each time that it is sent.
    """

    id: str
    alert: str
    """Id of the alert."""
    number: int
    """Its place among the changes of the alert, from 1."""
    change: Change
    name: str
    kind: str
    severity: Severity
    before: Severity | None
    """Its severity before it got worse."""
    deployment: str
    engine: str
    subject: str
    summary: str
    description: str
    incident: str
    at_unix: float
    fired_unix: float
    resolved_unix: float | None
    test: bool = False
    """Whether it is only there to try a receiver."""

    @property
    def labels(self) -> dict[str, str]:
        """What it is routed and grouped by; those that do not apply are left out."""
        labels = {
            "alertname": self.name,
            "severity": self.severity.value,
            "deployment": self.deployment,
            "engine": self.engine,
            "kind": self.kind,
            "receiver": self.subject,
            "source": SOURCE,
        }
        return {name: value for name, value in labels.items() if value}

    @property
    def where(self) -> str:
        """What it is about, in a few words."""
        if self.engine:
            return f"{self.deployment}, engine {self.engine}"
        return self.deployment or self.subject or "the server"

    @property
    def all_clear(self) -> bool:
        """Whether its end is good news: a forecast also ends because what it foresaw has come."""
        return self.name != BY_KIND["forecast"]

    @property
    def ending(self) -> str:
        """What its end means, for people."""
        return "It is over." if self.all_clear else FORECAST_OVER

    @property
    def title(self) -> str:
        """One line for messengers: `CRITICAL RankscopeWedged: chat, engine 3f2a`."""
        word = "RESOLVED" if self.change is Change.RESOLVED else self.severity.value.upper()
        return f"{'TEST ' if self.test else ''}{word} {self.name}: {self.where}"


@dataclass(frozen=True, slots=True)
class Links:
    """
    Where people find more: addresses of this server's pages, and of runbooks.
    """

    external_url: str = ""
    """Address under which people reach this server; empty if it is not known."""
    runbook_url: str = ""
    """Address of runbooks with `{name}` in it; empty: those that this server has."""

    def page(self, deployment: str, engine: str) -> str:
        """
        The page that shows an alert; empty where the server's address is not known.
        """
        return f"{self.external_url}{page_path(deployment, engine)}" if self.external_url else ""

    def incident(self, incident: str) -> str:
        """
        The page of an incident; empty where there is none, or the server's address is not known.
        """
        return f"{self.external_url}/incidents/{quote(incident, safe='')}" if incident and self.external_url else ""

    def runbook(self, name: str) -> str:
        """
        What to do about an alert; empty where no address is known, and for a test.
        """
        if name not in RULES:
            return ""
        if self.runbook_url:
            return self.runbook_url.replace("{name}", name)
        return f"{self.external_url}{runbook_path(name)}" if self.external_url else ""


def page_path(deployment: str, engine: str) -> str:
    """
    Path of the page that shows an alert.
    """
    if deployment and engine:
        return f"/deployments/{quote(deployment, safe='')}/engines/{quote(engine, safe='')}"
    return "/" if deployment else "/alerts"


def runbook_path(name: str) -> str:
    """
    Path of a runbook on this server.
    """
    return f"/runbooks/{quote(name, safe='')}"


def notice_of(transition: Transition) -> Notice:
    """
    What to tell receivers of a change.
    """
    return _notice(transition.alert, transition.change, transition.at_unix, transition.before)


def reminder_of(alert: Alert, now_unix: float) -> Notice:
    """
    What to tell receivers that forget alerts unless they are told again.
    """
    return _notice(alert, Change.FIRING, now_unix, None)


def _notice(alert: Alert, change: Change, at_unix: float, before: Severity | None) -> Notice:
    assert alert.fired_unix is not None
    key = alert.key
    return Notice(
        id=f"{alert.id}-{alert.told}",
        alert=alert.id,
        number=alert.told,
        change=change,
        name=key.name,
        kind=labelled_kind(key.name),
        severity=alert.severity,
        before=before,
        deployment=key.deployment,
        engine=key.engine,
        subject=key.subject,
        summary=alert.summary,
        description=_described(key.name, change),
        incident=alert.incident,
        at_unix=at_unix,
        fired_unix=alert.fired_unix,
        resolved_unix=alert.resolved_unix,
    )


def _described(name: str, change: Change) -> str:
    """
    What an alert means; of a forecast that has ended, that it may have come true.
    """
    if change is Change.RESOLVED and name == BY_KIND["forecast"]:
        return FORECAST_OVER
    return RULES[name].meaning if name in RULES else ""


def tried(name: str, change: Change, severity: Severity, at_unix: float, fired_unix: float) -> Notice:
    """
    A notice that only tries a receiver; `name` makes it one of its own.
    """
    resolved = at_unix if change is Change.RESOLVED else None
    return Notice(
        id=f"test-{name}-{change.value}",
        alert=f"test-{name}",
        number=1 if change is Change.FIRING else 2,
        change=change,
        name="RankscopeTest",
        kind="test",
        severity=severity,
        before=None,
        deployment="test",
        engine="",
        subject="",
        summary="This is a test: nothing is wrong",
        description="Sent by `rankscope alert test` to try this receiver. Its end is sent as well.",
        incident="",
        at_unix=at_unix,
        fired_unix=fired_unix,
        resolved_unix=resolved,
        test=True,
    )


def view_of(alert: Alert, links: Links) -> AlertView:
    """
    An alert as pages and API show it.
    """
    key = alert.key
    return AlertView(
        key.name,
        key.deployment,
        key.engine,
        alert.state,
        alert.severity,
        alert.summary,
        alert.pending_unix,
        alert.fired_unix,
        alert.resolved_unix,
        page_path(key.deployment, key.engine),
        links.runbook(key.name) or runbook_path(key.name),
        alert.incident,
    )


def as_warning(notice: Notice) -> Notice | None:
    """
    What an alert that got worse was before, as resolved: its severity is a label, and another label is another alert.
    None where it did not get worse.
    """
    if notice.before is None:
        return None
    return dataclasses.replace(
        notice, change=Change.RESOLVED, severity=notice.before, before=None, resolved_unix=notice.at_unix
    )


def iso_time(unix: float) -> str:
    """
    A time as receivers read it: RFC 3339, in UTC.
    """
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
