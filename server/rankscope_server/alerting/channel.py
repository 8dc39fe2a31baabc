"""
Sends to one receiver what it is to be told, until it has taken it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import structlog

from rankscope_server.domain.alert import ReceiverView
from rankscope_server.domain.alert_notice import Notice
from rankscope_server.domain.alert_outbox import Queue, admit, give_up, next_due, plan_next, refused, taken
from rankscope_server.domain.clock import Moment
from rankscope_server.ingest.clock import Clock
from rankscope_server.notify.receiver import DeliveryError, Receiver

logger = structlog.get_logger("rankscope.alerts")

LONGEST_WAIT_SECONDS = 60.0
REMIND_AGAIN_SECONDS = 5.0
"""
Pause after a reminder that was not taken: a receiver that was restarted knows nothing until one is.
"""


class Desk(Protocol):
    """
    Where the channel reports, and asks.
    """

    def settled(self, receiver: str, notices: Sequence[Notice], *, delivered: bool, now: Moment) -> None:
        """
        Notices were taken, or are given up.
        """

    def reminders(self, receiver: str, now: Moment) -> list[Notice]:
        """
        What a receiver was told of that still fires.
        """
        ...


class Channel:
    """
    One receiver, its queue, and how it does.
    """

    def __init__(self, receiver: Receiver, desk: Desk, clock: Clock, changed: Callable[[], None]) -> None:
        self.receiver = receiver
        self.queue: Queue = ()
        self.delivered = 0
        self.failed = 0
        """Attempts that failed."""
        self.given_up = 0
        self.error = ""
        self.failing_since: Moment | None = None
        self.seconds = 0.0
        """From the hand-over of a notice to its delivery, added up over all deliveries."""
        self._delivered_unix: float | None = None
        self._healthy: bool | None = None
        self._desk = desk
        self._clock = clock
        self._changed = changed
        self._woken = anyio.Event()
        self._remind_at = clock.now().monotonic

    def put(self, notice: Notice) -> None:
        """
        Send a notice, at once if the receiver takes it.
        """
        now = self._clock.now()
        self.queue, dropped = admit(self.queue, notice, now.monotonic)
        self._give_up([waiting.notice for waiting in dropped], now)
        self._woken.set()

    async def work(self) -> float:
        """
        Send all that is due; seconds until something will be.
        """
        while notices := self._next():
            if not await self._send(notices):
                continue
            now = self._clock.now()
            waited = [waiting for waiting in self.queue if waiting.notice in notices]
            self.seconds += sum(now.monotonic - waiting.since for waiting in waited)
            self.queue = taken(self.queue, notices, now.monotonic)
            self.delivered += len(notices)
            self._desk.settled(self.receiver.name, notices, delivered=True, now=now)
        await self._remind()
        now = self._clock.now()
        due = [LONGEST_WAIT_SECONDS + now.monotonic, next_due(self.queue)]
        if self.receiver.remind_seconds is not None:
            due.append(self._remind_at)
        return max(0.0, min(at for at in due if at is not None) - now.monotonic)

    async def run(self) -> None:
        """
        Send until cancelled.
        """
        while True:
            self._woken = anyio.Event()
            seconds = await self.work()
            with anyio.move_on_after(seconds):
                await self._woken.wait()

    def view(self) -> ReceiverView:
        """
        How the receiver does.
        """
        return ReceiverView(
            self.receiver.name,
            self.receiver.kind,
            self.receiver.where,
            self._healthy,
            self.error,
            self.delivered,
            len(self.queue),
            self.given_up,
            self._delivered_unix,
            None if self.failing_since is None else self.failing_since.unix,
        )

    def _next(self) -> tuple[Notice, ...]:
        now = self._clock.now()
        self.queue, dropped = give_up(self.queue, now.monotonic)
        self._give_up([waiting.notice for waiting in dropped], now)
        return plan_next(self.queue, now.monotonic, self.receiver.batch)

    def _give_up(self, notices: Sequence[Notice], now: Moment) -> None:
        if not notices:
            return
        self.given_up += len(notices)
        for notice in notices:
            logger.error("alert.given_up", receiver=self.receiver.name, id=notice.id, alert=notice.name)
        self._desk.settled(self.receiver.name, notices, delivered=False, now=now)

    async def _remind(self) -> None:
        every, now = self.receiver.remind_seconds, self._clock.now()
        if every is None or now.monotonic < self._remind_at:
            return
        waiting = {waiting.notice.alert for waiting in self.queue}
        notices = [n for n in self._desk.reminders(self.receiver.name, now) if n.alert not in waiting]
        sent = True
        for at in range(0, len(notices), self.receiver.batch):
            sent = sent and await self._send(tuple(notices[at : at + self.receiver.batch]))
        self._remind_at = now.monotonic + (every if sent else min(every, REMIND_AGAIN_SECONDS))

    async def _send(self, notices: tuple[Notice, ...]) -> bool:
        try:
            await self.receiver.send(notices, self._clock.now().unix)
        except DeliveryError as error:
            self._fails(notices, str(error), reached=error.reached)
            return False
        except Exception as error:  # a receiver of which we know too little must not end its loop
            logger.exception("receiver.crashed", receiver=self.receiver.name)
            self._fails(
                notices, f"sending failed ({type(error).__name__}): see the server's log, and report it", reached=False
            )
            return False
        if self.failing_since is not None:
            logger.info("receiver.back", receiver=self.receiver.name)
        self._healthy, self.error, self.failing_since = True, "", None
        self._delivered_unix = self._clock.now().unix
        self._changed()
        return True

    def _fails(self, notices: tuple[Notice, ...], error: str, *, reached: bool) -> None:
        now = self._clock.now()
        if error != self.error:
            logger.warning("receiver.failed", receiver=self.receiver.name, error=error)
        self.failed += 1
        self._healthy, self.error = False, error
        self.failing_since = self.failing_since or now
        self.queue = refused(self.queue, notices, now.monotonic, reached=reached)
        self._changed()
