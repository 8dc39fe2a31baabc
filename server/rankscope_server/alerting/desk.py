"""
Alerts at work: looks at what was found, follows each alert through its life, and sees to it that receivers hear of it.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import structlog

from rankscope_server.alerting.channel import Channel
from rankscope_server.alerting.ledger import Ledger
from rankscope_server.domain.alert import AlertState, AlertsView
from rankscope_server.domain.alert_life import Alert, Change, Transition, follow, restored
from rankscope_server.domain.alert_notice import Links, Notice, notice_of, reminder_of, view_of
from rankscope_server.domain.alert_routes import Route, plan_deliveries
from rankscope_server.domain.alert_rules import (
    FORECAST_SECONDS,
    AlertKey,
    Condition,
    Timing,
    assess_engine,
    assess_exporters,
    assess_receiver,
    loudness,
)
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, ExporterFacts
from rankscope_server.domain.model import Finding
from rankscope_server.domain.outlook import UNFORESEEN, Forecast
from rankscope_server.ingest.clock import Clock
from rankscope_server.notify.receiver import Receiver
from rankscope_server.store.alerts import AlertStore, AlertWrite, KeptAlerts, Settled

logger = structlog.get_logger("rankscope.alerts")

TICK_SECONDS = 1.0
PAST = 200
"""
Resolved alerts that pages can show.
"""
SWEEP_SECONDS = 600.0
RETENTION_SECONDS = 7 * 86400.0
OWN = ""
"""
The deployment of alerts about the server itself.
"""


@dataclass(frozen=True, slots=True)
class EngineLook:
    """
    An engine as it is now.
    """

    facts: EngineFacts
    findings: Sequence[Finding]
    """Current ones, the worst first: `domain.state.current_findings`."""
    forecast: Forecast = UNFORESEEN
    incident: str = ""
    """Id of the incident that is open on it."""


class AlertDesk:
    """
    All alerts, and the channels to their receivers. One event loop owns it; `observe` waits for nothing.
    """

    def __init__(
        self,
        receivers: Iterable[tuple[Receiver, Route]],
        clock: Clock,
        *,
        deployments: Collection[str],
        timings: Mapping[str, Timing] | None = None,
        links: Links | None = None,
        within_seconds: float = FORECAST_SECONDS,
        retention_seconds: float = RETENTION_SECONDS,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.ledger = Ledger()
        self._clock = clock
        self._deployments = frozenset(deployments)
        self._timings = timings or {}
        self._links = links or Links()
        self._within_seconds = within_seconds
        self._retention_seconds = retention_seconds
        self._changed = changed
        self._routes: list[Route] = []
        self.channels: dict[str, Channel] = {}
        for receiver, route in receivers:
            self._routes.append(route)
            self.channels[receiver.name] = Channel(receiver, self, clock, changed)
        self._alerts: dict[str, dict[AlertKey, Alert]] = {}
        """Pending and firing ones, by deployment."""
        self._past: list[Alert] = []
        """Resolved ones, newest first."""
        self._told: dict[str, set[str]] = {}
        """Per alert: the receivers that know of it, or will."""
        self._out: list[AlertWrite] = []
        """What is to be kept, and then told."""
        self._keeping: list[AlertWrite] = []
        """What is being kept."""
        self._woken = anyio.Event()
        self._swept = float("-inf")
        self._crashed = ""

    # -- looks

    def observe(
        self, deployment: str, looks: Sequence[EngineLook], exporters: Sequence[ExporterFacts], now: Moment
    ) -> None:
        """
        Look at a deployment: all its engines, and all its exporters.
        """
        conditions = [
            condition
            for look in looks
            for condition in assess_engine(
                look.facts,
                look.findings,
                look.forecast,
                incident=look.incident,
                within_seconds=self._within_seconds,
            )
        ]
        conditions += assess_exporters(deployment, [look.facts for look in looks], exporters, now)
        if not conditions and not self._alerts.get(deployment):
            return
        reached = {one.url: one.reached(now) for one in exporters}
        self._follow(deployment, conditions, reached, now)

    def tick(self) -> None:
        """
        Look at the receivers, and at alerts of deployments that are watched no more.
        """
        now = self._clock.now()
        failing = [
            assess_receiver(name, channel.error, len(channel.queue))
            for name, channel in self.channels.items()
            if channel.failing_since is not None
        ]
        if failing or self._alerts.get(OWN):
            self._follow(OWN, failing, {}, now)
        for deployment in [name for name in self._alerts if name != OWN and name not in self._deployments]:
            self._follow(deployment, (), {}, now)

    def _follow(
        self, deployment: str, conditions: Iterable[Condition], reached: Mapping[str, bool], now: Moment
    ) -> None:
        before = self._alerts.get(deployment, {})
        after, transitions = follow(before, conditions, reached, self._timings, now)
        self._alerts[deployment] = after
        for transition in transitions:
            self._tell(transition)
        if transitions or before.keys() != after.keys():
            self._changed()

    def _tell(self, transition: Transition) -> None:
        alert, notice = transition.alert, notice_of(transition)
        log = logger.info if transition.change is Change.RESOLVED else logger.warning
        log(f"alert.{transition.change.value}", alert=alert.key.name, deployment=alert.key.deployment, engine=alert.key.engine, severity=alert.severity.value, id=alert.id)  # fmt: skip
        deliveries = plan_deliveries(notice, self._routes, self._told.get(alert.id, ()))
        if transition.change is Change.RESOLVED:
            self._told.pop(alert.id, None)
            self._past.insert(0, alert)
            del self._past[PAST:]
        else:
            self._told.setdefault(alert.id, set()).update(receiver for receiver, _ in deliveries)
        self._put(AlertWrite((alert,), deliveries))

    def _put(self, write: AlertWrite) -> None:
        self._out.append(write)
        self._woken.set()

    # -- work

    async def run(self) -> None:
        """
        Send alerts until cancelled.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._guard, "keeping alerts", self.ledger.run)
            tasks.start_soon(self._guard, "handing over alerts", self._dispatch)
            tasks.start_soon(self._guard, "looking at receivers", self._tick)
            for name, channel in self.channels.items():
                tasks.start_soon(self._guard, f"sending alerts to {name}", channel.run)

    async def _guard(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """
        Begin again with what has failed: one loop must not end the others.
        """
        while True:
            try:
                await work()
            except Exception as error:
                logger.exception("alerts.crashed", what=what)
                self._crashed = f"{what} failed ({type(error).__name__}): see the server's log, and report it"
                self._changed()
            await anyio.sleep(TICK_SECONDS)

    async def dispatch(self) -> None:
        """
        Keep what has changed, then hand it to the channels.
        """
        writes, self._out = self._out, []
        if not writes:
            return
        self._keeping = writes
        alerts = tuple(alert for write in writes for alert in write.alerts)
        deliveries = tuple(delivery for write in writes for delivery in write.deliveries)
        await self.ledger.soon(AlertWrite(alerts, deliveries))
        self._keeping = []
        for receiver, notice in deliveries:
            self.channels[receiver].put(notice)

    async def _dispatch(self) -> None:
        while True:
            if not self._out:
                self._woken = anyio.Event()
                await self._woken.wait()
            await self.dispatch()

    async def _tick(self) -> None:
        while True:
            self.tick()
            await self._sweep()
            await self._clock.sleep(TICK_SECONDS)

    async def _sweep(self) -> None:
        now = self._clock.now()
        if now.monotonic - self._swept >= SWEEP_SECONDS:
            self._swept = now.monotonic
            await self.ledger.sweep(now.unix - self._retention_seconds)

    async def close(self) -> None:
        """
        Keep what is not kept yet. What receivers have not taken is sent when the server is started again.
        """
        writes, self._out = self._out, []
        for write in writes:
            self.ledger.later(write)
        await self.ledger.flush()
        for channel in self.channels.values():
            await channel.receiver.close()

    async def restore(self, store: AlertStore) -> None:
        """
        Take back what an earlier run of the server has left, and keep everything in this store from here on.

        Raises:
            StoreError: it cannot be read.

        """
        kept = await store.kept(PAST)
        self._take_back(kept, self._clock.now())
        self.ledger.attach(store)

    def _take_back(self, kept: KeptAlerts, now: Moment) -> None:
        self._past = [*self._past, *kept.past][:PAST]
        overtaken: set[str] = set()
        for alert in kept.firing:
            alerts = self._alerts.setdefault(alert.key.deployment, {})
            known = alerts.get(alert.key)
            if known is not None and known.state is AlertState.FIRING:
                # The store was away when it fired anew: receivers know the newer one.
                overtaken.add(alert.id)
                self._put(AlertWrite((restored(alert, now).ended(now.unix),)))
                continue
            alerts[alert.key] = restored(alert, now)
            self._told[alert.id] = set(kept.told.get(alert.id, ())) & self.channels.keys()
        for receiver, notice in kept.waiting:
            if receiver in self.channels and notice.alert not in overtaken:
                self.channels[receiver].put(notice)
            else:
                self.settled(receiver, [notice], delivered=False, now=now)
        for alert in kept.firing:
            if alert.id not in overtaken:
                self._tell_newcomers(alert, now)
        self._changed()

    def _tell_newcomers(self, alert: Alert, now: Moment) -> None:
        """
        Receivers that were added since hear of what still fires.
        """
        told = self._told[alert.id]
        deliveries = plan_deliveries(
            reminder_of(alert, now.unix), [r for r in self._routes if r.receiver not in told], ()
        )
        told.update(receiver for receiver, _ in deliveries)
        if deliveries:
            self._put(AlertWrite((), deliveries))

    # -- what channels report and ask

    def settled(self, receiver: str, notices: Sequence[Notice], *, delivered: bool, now: Moment) -> None:
        """
        Notices were taken, or are given up: whoever was not told of the beginning of an alert does not know it.
        """
        for notice in notices:
            if not delivered and notice.change is Change.FIRING:
                self._told.get(notice.alert, set()).discard(receiver)
        self.ledger.later(
            AlertWrite(settled=tuple(Settled(notice.id, receiver, delivered, now.unix) for notice in notices))
        )

    def reminders(self, receiver: str, now: Moment) -> list[Notice]:
        """
        What a receiver was told of that still fires. Of what is not kept yet it hears once that is.
        """
        unkept = {notice.alert for write in (*self._out, *self._keeping) for _, notice in write.deliveries}
        return [
            reminder_of(alert, now.unix)
            for alerts in self._alerts.values()
            for alert in alerts.values()
            if alert.state is AlertState.FIRING and alert.id not in unkept and receiver in self._told.get(alert.id, ())
        ]

    # -- reads

    def view(self) -> AlertsView:
        """
        The alerts page.
        """
        active = sorted(
            self.active(),
            key=lambda a: (a.state is AlertState.PENDING, -loudness(a.severity), -(a.fired_unix or a.pending_unix)),
        )
        return AlertsView(
            tuple(view_of(alert, self._links) for alert in active),
            tuple(view_of(alert, self._links) for alert in self._past),
            tuple(channel.view() for channel in self.channels.values()),
        )

    def active(self) -> list[Alert]:
        """
        Alerts that are pending or fire.
        """
        return [alert for alerts in self._alerts.values() for alert in alerts.values()]

    def problems(self) -> tuple[str, ...]:
        """
        What keeps alerts from being kept or heard of, each with the remedy.
        """
        failing = [
            f"Alerts do not reach {name} ({channel.receiver.where}): {channel.error}"
            for name, channel in self.channels.items()
            if channel.failing_since is not None
        ]
        return (*filter(None, (self._crashed, self.ledger.problem)), *failing)
