"""
When requests arrive and how long they are: the same for the same seed.

A request keeps the guards of all ranks together until it is masked on the first rank, which takes two steps that
reject drafts, so five steps at least. So steady arrivals closer together than that hold an engine open for as long
as they come, although its ranks have drifted apart long before; the first lull wedges it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rankscope_exporter.simulation.spec import Workload

HOLDING_INTERVAL = 3
"""
Steps between two arrivals that surely hold an engine open.
"""

LULL_ARRIVALS = 1.0
"""
Requests per second in a lull: a request that runs alone gets masked alone.
"""

LONG_EVERY = 12
"""
One of so many requests comes with another one whose prompt takes several steps to read.
"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """
    A request that has come in: its lengths in tokens, and the seed that decides which of its drafts are accepted.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    seed: int


class Traffic:
    """
    The arrivals of one engine, tick by tick; a tick is the time of a step, whether or not there is one.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._random = np.random.default_rng(workload.seed)
        self._tick = self._number = 0
        self._credit = 1.0  # the first request comes at once

    def tick(self) -> list[Arrival]:
        """
        The requests that arrive in the next tick.
        """
        workload = self._workload
        second = self._tick / workload.steps_per_second
        busy = second % max(workload.hold_seconds + workload.lull_seconds, 1e-9) < workload.hold_seconds
        regular = workload.arrivals
        if regular is None:
            regular = workload.steps_per_second / HOLDING_INTERVAL
        self._tick += 1
        arrived = list(self._take())
        self._credit += (regular if busy else min(regular, LULL_ARRIVALS)) / workload.steps_per_second
        return arrived

    def _take(self) -> Iterator[Arrival]:
        while self._credit >= 1.0 - 1e-9:
            self._credit -= 1.0
            yield self._make(16, 256)
            if self._number % LONG_EVERY == 0:
                yield self._make(1200, 2400)

    def _make(self, shortest: int, longest: int) -> Arrival:
        self._number += 1
        prompt, output, seed = self._random.integers((shortest, 20, 0), (longest + 1, 120, 1 << 31)).tolist()
        return Arrival(f"sim-{self._number:06d}", prompt, output, seed)
