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
A firing alert that could not be delivered for so long is old news: neither it nor its end is delivered any more.
"""

RESOLVED_GIVE_UP_SECONDS = 86400.0
"""
The end of an alert that was delivered is worth more patience: somebody waits for it.
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


def plan_next(queue: Queue, now: float) -> Waiting | None:
    """
    The notice to send now, the one that is due for longest; None where there is none.
    """
    due = [waiting for waiting in _first_of_each(queue) if waiting.due <= now]
    return min(due, key=lambda waiting: waiting.due, default=None)


def next_due(queue: Queue) -> float | None:
    """
    When the next notice is due; None where none waits.
    """
    return min((waiting.due for waiting in _first_of_each(queue)), default=None)


def taken(queue: Queue, notice: Notice, now: float) -> Queue:
    """
    The queue after a notice was taken: the receiver is well, so whatever has failed before is due at once.
    """
    return tuple(
        dataclasses.replace(waiting, due=min(waiting.due, now)) for waiting in queue if waiting.notice.id != notice.id
    )


def refused(queue: Queue, notice: Notice, now: float, *, reached: bool) -> Queue:
    """
    The queue after a notice was not taken. A receiver that was not even reached takes no other one either, for now.
    """
    failed = next((waiting for waiting in queue if waiting.notice.id == notice.id), None)
    if failed is None:
        return queue
    again = now + retry_seconds(failed.attempts)
    return tuple(
        dataclasses.replace(waiting, due=again, attempts=waiting.attempts + 1)
        if waiting is failed
        else waiting
        if reached
        else dataclasses.replace(waiting, due=max(waiting.due, again))
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
    late = [waiting.notice for waiting in _first_of_each(queue) if now - waiting.since >= _patience(waiting.notice)]
    if not late:
        return queue, ()
    alerts = {notice.alert for notice in late if notice.change is Change.FIRING}
    ids = {notice.id for notice in late}
    dropped = tuple(w for w in queue if w.notice.alert in alerts or w.notice.id in ids)
    return tuple(waiting for waiting in queue if waiting not in dropped), dropped


def _patience(notice: Notice) -> float:
    return RESOLVED_GIVE_UP_SECONDS if notice.change is Change.RESOLVED else GIVE_UP_SECONDS


def _first_of_each(queue: Queue) -> Sequence[Waiting]:
    first: dict[str, Waiting] = {}
    for waiting in queue:
        first.setdefault(waiting.notice.alert, waiting)
    return list(first.values())
