"""
What a receiver has not taken yet: which notice goes next, when a failed one is tried again, and when it is given up.

The notices of one alert go in their order; those of different alerts wait for nobody. Times are monotonic seconds.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_notice import Notice

GIVE_UP_SECONDS = 3600.0
"""
An alert that came and went while its receiver took nothing is old news so long after its end: nothing of it is sent any
more. One that still fires is never given up.
"""

RESOLVED_GIVE_UP_SECONDS = 86400.0
"""
The end of an alert that the receiver knows of is worth more patience: somebody waits for it.
"""

LIMIT = 1000
"""
Notices that wait for one receiver, at most.
"""

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """
    A notice that a receiver has not taken.
    """

    notice: Notice
    since: float
    due: float
    """When it is to be sent, or sent again."""
    attempts: int = 0


Queue = tuple[Waiting, ...]
"""
Oldest first.
"""


def admit(queue: Queue, notice: Notice, now: float) -> tuple[Queue, Queue]:
    """
    The queue with one notice more, due at once; and what had to make room for it.

    All notices of an alert go together: an end without a beginning helps nobody. Alerts that nobody was told of go first.
    """
    queue = (*queue, Waiting(notice, now, now))
    if len(queue) <= LIMIT:
        return queue, ()
    others = [waiting.notice for waiting in queue if waiting.notice.alert != notice.alert]
    untold = [other.alert for other in others if other.change is Change.FIRING]
    leaving = next(iter([*untold, *(other.alert for other in others)]), notice.alert)
    return (
        tuple(waiting for waiting in queue if waiting.notice.alert != leaving),
        tuple(waiting for waiting in queue if waiting.notice.alert == leaving),
    )


def plan_next(queue: Queue, now: float, batch: int = 1) -> tuple[Notice, ...]:
    """
    The notices to send now, at most `batch`, those that are due for longest first; empty where there is none.

    One that has failed goes alone, so that it fails no other.
    """
    due = sorted((w for w in _first_of_each(queue) if w.due <= now), key=lambda w: w.due)
    if due and due[0].attempts:
        return (due[0].notice,)
    return tuple(waiting.notice for waiting in due if not waiting.attempts)[:batch]


def next_due(queue: Queue) -> float | None:
    """
    When the next notice is due; None where none waits.
    """
    return min((waiting.due for waiting in _first_of_each(queue)), default=None)


def taken(queue: Queue, notices: Sequence[Notice], now: float) -> Queue:
    """
    The queue after notices were taken: the receiver is well, so whatever has failed before is due at once.
    """
    ids = {notice.id for notice in notices}
    return tuple(
        dataclasses.replace(waiting, due=min(waiting.due, now)) for waiting in queue if waiting.notice.id not in ids
    )


def refused(queue: Queue, notices: Sequence[Notice], now: float, *, reached: bool) -> Queue:
    """
    The queue after notices were not taken. A receiver that was not even reached takes no other one either, for now.
    """
    ids = {notice.id for notice in notices}
    failed = [waiting for waiting in queue if waiting.notice.id in ids]
    if not failed:
        return queue
    pause = now + retry_seconds(min(waiting.attempts for waiting in failed))
    return tuple(
        dataclasses.replace(waiting, due=now + retry_seconds(waiting.attempts), attempts=waiting.attempts + 1)
        if waiting.notice.id in ids
        else waiting
        if reached
        else dataclasses.replace(waiting, due=max(waiting.due, pause))
        for waiting in queue
    )


def retry_seconds(attempts: int) -> float:
    """
    Pause after a failure, when `attempts` failed before it.
    """
    return float(min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(attempts, 16)))


def give_up(queue: Queue, now: float) -> tuple[Queue, Queue]:
    """
    The queue without what comes too late, and that. With the beginning of an alert goes all that follows it.
    """
    first = {waiting.notice.alert: waiting.notice.change for waiting in _first_of_each(queue)}
    late = {
        waiting.notice.alert
        for waiting in queue
        if waiting.notice.change is Change.RESOLVED
        and now - waiting.since
        >= (GIVE_UP_SECONDS if first[waiting.notice.alert] is Change.FIRING else RESOLVED_GIVE_UP_SECONDS)
    }
    if not late:
        return queue, ()
    return (
        tuple(waiting for waiting in queue if waiting.notice.alert not in late),
        tuple(waiting for waiting in queue if waiting.notice.alert in late),
    )


def _first_of_each(queue: Queue) -> Sequence[Waiting]:
    first: dict[str, Waiting] = {}
    for waiting in queue:
        first.setdefault(waiting.notice.alert, waiting)
    return list(first.values())
