"""
Alerts under any sequence of findings, dead receivers, failing stores, kills and clock jumps.
"""

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from made_alerts import MadeDesk, MadeReceiver, MadeStore, made_finding
from made_ranks import ManualClock

from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_rules import BY_KIND
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.model import Finding, FindingKind, Severity

STALLED = made_finding(FindingKind.STALLED)
MIXED = made_finding(FindingKind.MITIGATION_MIXED, Severity.CRITICAL)
SITUATIONS: tuple[list[Finding], ...] = (
    [],
    [STALLED],
    [dataclasses.replace(STALLED, severity=Severity.CRITICAL)],
    [MIXED],
    [STALLED, MIXED],
)
NAMES = ("ops", "chat", "manager")
SOME = ((), ("ops",), ("chat", "manager"), NAMES)


@dataclasses.dataclass(frozen=True)
class Step:
    """What happens between two looks."""

    situation: int
    seconds: float
    jump: float
    reached: bool
    broken: bool
    down: Sequence[str]
    dispatched: bool
    asked: Sequence[str]
    kept: bool
    killed: bool


steps = st.lists(
    st.builds(
        Step,
        situation=st.integers(0, len(SITUATIONS) - 1),
        seconds=st.sampled_from([0.5, 31.0, 3.0, 16.0]),
        jump=st.sampled_from([0.0, 0.0, -1e6, 1e6]),
        reached=st.sampled_from([True, True, True, False]),
        broken=st.sampled_from([False, False, False, True]),
        down=st.sampled_from(SOME),
        dispatched=st.sampled_from([True, True, False]),
        asked=st.sampled_from(SOME[::-1]),
        kept=st.booleans(),
        killed=st.sampled_from([False, False, True]),
    ),
    min_size=2,
    max_size=12,
)


class World:
    """One engine, three receivers, a store, and a server that is killed now and then."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.store = MadeStore()
        manager = MadeReceiver("manager", batch=64, remind_seconds=60)
        self.receivers = (MadeReceiver("ops"), MadeReceiver("chat"), manager)
        self.start()

    def start(self) -> None:
        self.desk = MadeDesk(self.clock, self.store, *self.receivers)
        self.do(self.desk.restore())

    def do(self, work: Coroutine[None, None, None]) -> None:
        self.loop.run_until_complete(work)

    def look(self, step: Step) -> None:
        now = self.clock.now()
        self.clock.moment = Moment(now.unix + step.seconds + step.jump, now.monotonic + step.seconds)
        self.desk.findings, self.desk.reached = SITUATIONS[step.situation], step.reached
        self.desk.look()

    def take(self, step: Step) -> None:
        """A look, and as much of what follows from it as the step says."""
        self.look(step)
        self.store.broken = step.broken
        for receiver in self.receivers:
            receiver.down = receiver.name in step.down
        if step.dispatched:
            self.do(self.desk.dispatch())
        for name in step.asked:
            self.do(self.desk.work(name))
        if step.kept:
            self.do(self.desk.desk.ledger.flush())
        # What was sent and could never be written is not known after a kill: nobody could tell of its end.
        if step.killed and not any(write.deliveries for write in self.desk.desk.ledger._waiting):
            self.store.broken = False
            self.clock.moment = Moment(self.clock.now().unix, 5.0)
            self.start()

    def settle(self, situation: int) -> None:
        """All is well, for long enough."""
        self.store.broken = False
        for receiver in self.receivers:
            receiver.down = False
        for _ in range(4):
            self.look(Step(situation, 31.0, 0.0, True, False, (), True, NAMES, True, False))
            self.do(self.desk.dispatch())
            self.do(self.desk.work())
            self.do(self.desk.desk.ledger.flush())

    def check_order(self) -> None:
        """No end without a beginning, no beginning twice, nothing after the end."""
        for receiver in self.receivers:
            for changes in receiver.heard().values():
                assert changes[0] is Change.FIRING
                assert changes.count(Change.FIRING) == 1
                assert Change.RESOLVED not in changes[:-1]

    def close(self) -> None:
        self.store.close()
        self.loop.close()


@settings(max_examples=40, deadline=None)
@given(steps, st.integers(0, len(SITUATIONS) - 1))
def test_every_receiver_hears_once_that_an_alert_fires_and_once_that_it_is_over(
    sequence: list[Step], situation: int
) -> None:
    """Whatever fails in whatever order: once all is well, every receiver knows exactly what holds."""
    world = World()
    try:
        for step in sequence:
            world.take(step)
            world.check_order()
        world.settle(situation)
        holding = sorted(BY_KIND[finding.kind.value] for finding in SITUATIONS[situation])
        assert [receiver.firing() for receiver in world.receivers] == [holding] * 3
        world.settle(0)
        world.check_order()
        subjects = {notice.alert: notice.subject for receiver in world.receivers for notice in receiver.took}
        for receiver in world.receivers:
            heard = receiver.heard()
            assert heard.keys() == {alert for alert, subject in subjects.items() if subject != receiver.name}
            assert all(changes[-1] is Change.RESOLVED for changes in heard.values())
        assert world.desk.desk.active() == []
    finally:
        world.close()
