"""
When what happens in a soak: a seeded plan, on a clock that runs only while an engine serves.

The first three quarters hold the events, evenly spaced with some jitter; in the last quarter nothing happens, so that
what leaks slowly has time to show. The file system of the flight directory is full for one life of vLLM: for that
before the last restart, so that there is always a life after it that has room again.
"""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

BUSY_SHARE = 0.75
"""
Share of the time in which events fall.
"""


class Kind(enum.Enum):
    """
    What can happen.
    """

    EXPORTER_TERM = "exporter-term"
    """The exporter process is asked to end, and started again at once."""
    EXPORTER_KILL = "exporter-kill"
    """It is killed, and started again at once."""
    EXPORTER_OUTAGE = "exporter-outage"
    """It is killed, and started again once the rings have gone around: steps are lost, and must be reported."""
    VLLM_RESTART = "vllm-restart"
    STOP_WORKER = "stop-worker"
    """A rank's process is stopped by a signal for some seconds, then continued."""


_EXPORTER_KINDS = (
    Kind.EXPORTER_OUTAGE,
    Kind.EXPORTER_TERM,
    Kind.EXPORTER_KILL,
    Kind.EXPORTER_TERM,
    Kind.EXPORTER_KILL,
)
"""
The kinds of exporter restarts, over and over.
"""


@dataclass(frozen=True, slots=True)
class Event:
    """
    Something that happens after so many seconds of traffic; `pp_rank` says to which rank, where it is one.
    """

    at_seconds: float
    kind: Kind
    pp_rank: int = 0


def full_life(vllm_restarts: int) -> int | None:
    """
    The life of vLLM, counted from 0, in which the flight directory has no room; None if no life would follow it.
    """
    return vllm_restarts - 1 if vllm_restarts else None


def plan_events(
    seconds: float, *, exporter_restarts: int, vllm_restarts: int, stops: int, seed: int
) -> tuple[Event, ...]:
    """
    The events of a soak of so many seconds of traffic, in order.

    The first three exporter restarts are one of each kind. None of them, and no stop, falls into the life without room.
    """
    chance = random.Random(seed)
    exporter = [(_EXPORTER_KINDS[n % len(_EXPORTER_KINDS)], 0) for n in range(exporter_restarts)]
    stopped = [(Kind.STOP_WORKER, n % 2) for n in range(stops)]
    others = [*exporter, *stopped]
    chance.shuffle(others)
    order = _with_restarts(others, vllm_restarts)
    slot = seconds * BUSY_SHARE / max(len(order), 1)
    return tuple(
        Event(round(slot * (place + chance.uniform(0.3, 0.7)), 1), kind, pp_rank)
        for place, (kind, pp_rank) in enumerate(order)
    )


def _with_restarts(others: Sequence[tuple[Kind, int]], vllm_restarts: int) -> list[tuple[Kind, int]]:
    """
    `others` shared evenly by the lives that have room, with the restarts between them.
    """
    restart = (Kind.VLLM_RESTART, 0)
    if not vllm_restarts:
        return list(others)
    bounds = [len(others) * life // vllm_restarts for life in range(vllm_restarts + 1)]
    order: list[tuple[Kind, int]] = []
    for life in range(vllm_restarts):
        if life == vllm_restarts - 1:  # the life before this one has no room, and nothing else happens in it
            order += [restart] if life == 0 else [restart, restart]
        elif life:
            order.append(restart)
        order += others[bounds[life] : bounds[life + 1]]
    return order
