"""The desk: from what was found to what receivers hear."""

import dataclasses

import anyio
import pytest
import sqlalchemy as sa
from made_alerts import MadeDesk, MadeReceiver, MadeStore, made_finding
from made_ranks import ManualClock

from rankscope_server.alerting.telemetry import AlertCollector
from rankscope_server.domain.alert import AlertState
from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_routes import Route
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.model import FindingKind, Severity

pytestmark = pytest.mark.anyio

WEDGED = made_finding(FindingKind.WEDGED, Severity.CRITICAL, "pp1 never came back")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store():
    made = MadeStore()
    yield made
    made.close()


@pytest.fixture
async def desk(clock, store) -> MadeDesk:
    made = MadeDesk(clock, store, MadeReceiver("ops"), MadeReceiver("chat"))
    await made.restore()
    return made


async def again(desk: MadeDesk) -> MadeDesk:
    """The server after it was killed and started again: another monotonic clock, the same store and receivers."""
    desk.clock.moment = Moment(desk.clock.now().unix + 3, 7.0)
    made = MadeDesk(desk.clock, desk.store, *desk.receivers)
    made.findings, made.reached, made.known = desk.findings, desk.reached, desk.known
    await made.restore()
    return made


async def test_an_alert_is_told_when_it_fires_and_when_it_is_over(desk, clock):
    """To every receiver, once, with the sentence of the finding."""
    desk.findings = [WEDGED]
    await desk.round()
    clock.advance(60)
    await desk.round()
    for receiver in desk.receivers:
        (notice,) = receiver.took
        assert (notice.change, notice.name, notice.summary) == (Change.FIRING, "RankscopeWedged", "pp1 never came back")
    desk.findings = []
    await desk.round()
    clock.advance(31)
    await desk.round()
    for receiver in desk.receivers:
        assert list(receiver.heard().values()) == [[Change.FIRING, Change.RESOLVED]]
    view = desk.desk.view()
    assert view.active == ()
    assert [(alert.name, alert.state) for alert in view.past] == [("RankscopeWedged", AlertState.RESOLVED)]


async def test_a_dead_receiver_delays_no_other_and_hears_everything_later(desk, clock):
    """It is shown, it is a problem of the server, and after a while an alert of its own."""
    ops, chat = desk.receivers
    ops.down = True
    desk.findings = [WEDGED]
    await desk.round()
    assert (ops.took, len(chat.took)) == ([], 1)
    for _ in range(4):
        clock.advance(10)
        await desk.round()
    assert chat.firing() == ["RankscopeReceiverFailing", "RankscopeWedged"]
    shown = next(view for view in desk.desk.view().receivers if view.name == "ops")
    assert (shown.healthy, shown.error, shown.waiting, shown.delivered) == (False, "connection refused", 1, 0)
    assert desk.desk.problems() == ("Alerts do not reach ops (https://host.example/...): connection refused",)
    ops.down = False
    for _ in range(3):
        clock.advance(31)
        await desk.round()
    assert (ops.firing(), chat.firing()) == (["RankscopeWedged"], ["RankscopeWedged"])
    assert desk.desk.problems() == ()


async def test_a_notice_that_is_refused_holds_no_other_up(desk, clock):
    """A receiver that answers takes what it understands."""
    ops, _ = desk.receivers
    ops.refuses = {"RankscopeDrift"}
    desk.findings = [made_finding(), WEDGED]
    await desk.round()
    assert ops.firing() == ["RankscopeWedged"]


async def test_killed_before_anything_was_sent_it_is_sent_after_the_restart(desk, clock):
    """What was kept is told, with the same id."""
    desk.findings = [WEDGED]
    desk.look()
    await desk.dispatch()
    desk = await again(desk)
    await desk.round()
    assert [receiver.firing() for receiver in desk.receivers] == [["RankscopeWedged"]] * 2


async def test_killed_between_sending_and_marking_the_same_id_is_sent_again(desk):
    """A receiver can tell that it came twice."""
    desk.findings = [WEDGED]
    desk.look()
    await desk.dispatch()
    await desk.work()
    desk = await again(desk)
    await desk.round()
    ops, _ = desk.receivers
    assert len(ops.took) == 2
    assert len({notice.id for notice in ops.took}) == 1


async def test_killed_between_two_notifications_the_end_is_told_after_the_restart(desk, clock):
    """Once, and not before the engine was seen again for as long as the alert is kept."""
    desk.findings = [WEDGED]
    await desk.round()
    desk.findings, desk.known, desk.reached = [], False, False
    desk = await again(desk)
    clock.advance(3600)
    await desk.round()
    assert [receiver.firing() for receiver in desk.receivers] == [["RankscopeWedged"]] * 2
    desk.reached = True
    await desk.round()
    clock.advance(29)
    await desk.round()
    assert "RankscopeWedged" in desk.receivers[0].firing()
    clock.advance(2)
    await desk.round()
    for receiver in desk.receivers:
        wedge = next(notice.alert for notice in receiver.took if notice.name == "RankscopeWedged")
        assert receiver.heard()[wedge] == [Change.FIRING, Change.RESOLVED]


async def test_a_receiver_that_was_added_since_hears_of_what_still_fires(desk, clock):
    """And of its end."""
    desk.findings = [WEDGED]
    await desk.round()
    newcomer = MadeReceiver("new")
    desk.receivers = (*desk.receivers, newcomer)
    desk = await again(desk)
    await desk.round()
    assert newcomer.firing() == ["RankscopeWedged"]
    assert [len(receiver.took) for receiver in desk.receivers] == [1, 1, 1]
    desk.findings = []
    await desk.round()
    clock.advance(31)
    await desk.round()
    assert newcomer.firing() == []


async def test_a_receiver_that_was_removed_is_told_nothing(desk, clock, store):
    """What waited for it is given up."""
    desk.receivers[0].down = True
    desk.findings = [WEDGED]
    await desk.round()
    desk.receivers = desk.receivers[1:]
    desk = await again(desk)
    await desk.round()
    rows = await store.read(sa.text("SELECT receiver, outcome FROM notifications ORDER BY 1"))
    assert [tuple(row) for row in rows] == [("chat", "delivered"), ("ops", "given up")]


async def test_a_store_that_cannot_be_written_holds_no_alert_up(desk, clock, store):
    """It is a problem that is shown, and written later."""
    store.broken = True
    desk.findings = [WEDGED]
    await desk.round()
    assert [receiver.firing() for receiver in desk.receivers] == [["RankscopeWedged"]] * 2
    assert "make room on its disk. Alerts are sent all the same" in desk.desk.problems()[0]
    store.broken = False
    await desk.round()
    assert desk.desk.problems() == ()
    desk = await again(desk)
    await desk.round()
    assert [len(receiver.took) for receiver in desk.receivers] == [1, 1]


async def test_a_store_that_opens_late_is_brought_up_to_date(clock, store):
    """What fired before it was open is in it; what an earlier run has left, and fired anew since, is not told twice."""
    ops = MadeReceiver("ops")
    first = MadeDesk(clock, store, ops)
    await first.restore()
    first.findings = [WEDGED]
    await first.round()
    clock.advance(1)
    late = MadeDesk(clock, store, ops)
    late.findings = [WEDGED]
    await late.round()
    await late.restore()
    await late.round()
    assert len({notice.alert for notice in ops.took}) == 2
    third = await again(late)
    third.findings = []
    await third.round()
    clock.advance(31)
    await third.round()
    assert sorted(map(len, ops.heard().values())) == [1, 2]
    assert [alert.state for alert in third.desk.active()] == []


async def test_an_alert_that_gets_loud_enough_reaches_the_pager(clock, store):
    """Whoever had it as a warning hears that it got worse."""
    tickets, pager = MadeReceiver("tickets"), MadeReceiver("pager")
    routes = {
        "tickets": Route("tickets", frozenset({Severity.WARNING})),
        "pager": Route("pager", frozenset({Severity.CRITICAL})),
    }
    desk = MadeDesk(clock, store, tickets, pager, routes=routes)
    stalled = made_finding(FindingKind.STALLED)
    desk.findings = [stalled]
    await desk.round()
    assert (len(tickets.took), len(pager.took)) == (1, 0)
    desk.findings = [dataclasses.replace(stalled, severity=Severity.CRITICAL)]
    clock.advance(60)
    await desk.round()
    desk.findings = []
    await desk.round()
    clock.advance(31)
    await desk.round()
    assert list(tickets.heard().values()) == [[Change.FIRING, Change.WORSE, Change.RESOLVED]]
    assert list(pager.heard().values()) == [[Change.FIRING, Change.RESOLVED]]


async def test_receivers_that_forget_are_reminded(clock, store):
    """Once a minute of what fires, sooner after a reminder that was not taken, and not of what is over."""
    manager = MadeReceiver("manager", batch=64, remind_seconds=60)
    desk = MadeDesk(clock, store, manager)
    await desk.round()
    desk.findings = [WEDGED, made_finding()]
    await desk.round()
    assert len(manager.took) == 2
    clock.advance(61)
    await desk.round()
    assert len(manager.took) == 4
    manager.down = True
    clock.advance(61)
    await desk.round()
    manager.down = False
    clock.advance(6)
    await desk.round()
    assert len(manager.took) == 6
    desk.findings = []
    await desk.round()
    clock.advance(31)
    await desk.round()
    clock.advance(61)
    await desk.round()
    assert [notice.change for notice in manager.took[6:]] == [Change.RESOLVED] * 2


async def test_of_an_alert_that_is_not_kept_yet_nobody_is_reminded(clock, store):
    """A server that is killed right then would not know of it any more."""
    manager = MadeReceiver("manager", batch=64, remind_seconds=60)
    desk = MadeDesk(clock, store, manager)
    desk.findings = [WEDGED]
    desk.look()
    await desk.work()
    assert manager.took == []
    await desk.dispatch()
    await desk.work()
    assert manager.firing() == ["RankscopeWedged"]


async def test_alerts_of_a_deployment_that_is_watched_no_more_end(desk, clock):
    """It was taken out of the settings."""
    desk.findings = [WEDGED]
    await desk.round()
    made = MadeDesk(clock, desk.store, *desk.receivers)
    made.desk._deployments = frozenset({"other"})
    await made.restore()
    for _ in range(2):
        made.desk.tick()
        await made.dispatch()
        await made.work()
        clock.advance(31)
    assert [receiver.firing() for receiver in desk.receivers] == [[], []]


async def test_old_alerts_are_forgotten(desk, clock, store):
    """Those that fire stay, however old."""
    drift = made_finding()
    desk.findings = [WEDGED, drift]
    await desk.round()
    desk.findings = [drift]
    await desk.round()
    clock.advance(31)
    await desk.round()
    await desk.desk.ledger.sweep(clock.now().unix + 1)
    rows = await store.read(sa.text("SELECT name, count(*) FROM alerts JOIN notifications ON alert = alerts.id GROUP BY 1"))  # fmt: skip
    assert [tuple(row) for row in rows] == [("RankscopeDrift", 2)]


async def test_metrics_tell_what_fires_and_who_hears(desk, clock):
    """A receiver to which nothing was sent is neither up nor down."""
    ops, _ = desk.receivers
    ops.down = True

    def value(name, **labels):
        return [
            sample.value
            for family in AlertCollector(desk.desk).collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    assert value("rankscope_server_receiver_up") == []
    desk.findings = [WEDGED]
    await desk.round()
    assert value("rankscope_server_alerts", state="firing", severity="critical") == [1]
    assert value("rankscope_server_receiver_up", receiver="ops") == [0]
    assert value("rankscope_server_receiver_up", receiver="chat") == [1]
    assert value("rankscope_server_notifications_waiting", receiver="ops") == [1]
    assert value("rankscope_server_notifications_delivered_total", receiver="chat") == [1]


async def test_a_store_that_hangs_holds_alerts_up_for_a_moment_only(clock, store, monkeypatch):
    """They are sent before it has answered; it gets everything once it does."""
    monkeypatch.setattr("rankscope_server.alerting.ledger.PATIENCE_SECONDS", 0.01)
    answered, write = anyio.Event(), store.write

    async def hang(*statements):
        await answered.wait()
        await write(*statements)

    store.write = hang
    made = MadeDesk(clock, store, MadeReceiver("ops"))
    del made.desk.ledger.soon  # as it is
    await made.restore()
    made.findings = [WEDGED]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.desk.ledger.run)
        made.look()
        await made.dispatch()
        await made.work()
        assert made.receivers[0].firing() == ["RankscopeWedged"]
        answered.set()
        with anyio.fail_after(60):
            while not await store.read(sa.text("SELECT 1 FROM notifications WHERE outcome = 'delivered'")):
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()


async def test_a_loop_that_crashes_begins_again_and_ends_no_other(clock, store, monkeypatch):
    """It is a problem that is shown; alerts go on."""
    monkeypatch.setattr("rankscope_server.alerting.desk.TICK_SECONDS", 0.001)
    ops, chat = MadeReceiver("ops"), MadeReceiver("chat")
    made = MadeDesk(clock, store, ops, chat)
    channel = made.desk.channels["ops"]
    work, crashes = channel.work, [KeyError("a mistake")]

    async def crash():
        if crashes:
            raise crashes.pop()
        return await work()

    channel.work = crash
    made.findings = [WEDGED]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.desk.run)
        made.look()
        with anyio.fail_after(60):
            while not (ops.took and chat.took):
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert made.desk.problems() == ("sending alerts to ops failed (KeyError): see the server's log, and report it",)
