"""
What the scheduler of a made engine tells its ranks, step by step: requests come, are read in chunks, decode, are
preempted, aborted, done. Every rank is told the same, so what follows from it alone is the same on all of them.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import sim_oddities as odds
from sim_oddities import Counts, Oddity
from sim_shape import Shape

CHUNK_TOKENS = 512
WORD = (1 << 64) - 1

Column = npt.NDArray[np.int64]


@dataclass(slots=True)
class Request:
    """
    A request, as the scheduler knows it.
    """

    id: int
    chunks: int
    """Steps that its prompt still takes before the one that samples."""
    computed: int = 0
    output: int = 0
    target: int = 0
    late: int = 0
    """Tokens that ranks other than the last count later than the scheduler."""


@dataclass(frozen=True, slots=True)
class Batches:
    """
    Columns over steps, the first at index 0: what is equal on all ranks.
    """

    new: Column
    cached: Column
    finished: Column
    tokens: Column
    drafting: Column
    requests: Column
    masked: Column
    mask_hash: npt.NDArray[np.uint64]
    batch_hash: npt.NDArray[np.uint64]
    length_sum: Column
    """Lengths of the cached requests as the scheduler counts them, in tokens."""
    length_max: Column
    late_sum: Column
    """How far ranks other than the last count less, in tokens."""
    late_max: Column
    """The same of the request in which it is least: `drift_max` is its negative."""
    dropped: Column
    """Received rows that were not used (V2), in this step."""
    drafts_follow: npt.NDArray[np.bool_]
    """Whether drafts are sent after the sampled tokens (V2)."""
    gap: npt.NDArray[np.float64]
    """Seconds without anything to do before the step."""
    stretch: npt.NDArray[np.float64]
    """Seconds that the step takes beyond its usual time."""

    def __len__(self) -> int:
        return len(self.new)


@dataclass(slots=True)
class Scheduler:
    """
    Makes batches. Those in flight take turns, so that a request is in one of them only.
    """

    shape: Shape
    random: Random
    counts: Counts
    turns: list[list[Request]] = field(default_factory=list)
    _preempted: list[Request] = field(default_factory=list)
    _finished: list[int] = field(default_factory=list)
    _ids: int = 0
    _hash: int = 0

    def __post_init__(self) -> None:
        self.turns = [[] for _ in range(self.shape.pp_size)]

    def run(self, steps: int) -> Batches:
        """
        So many steps.
        """
        rows = [self._step(step) for step in range(1, steps + 1)]
        columns: list[Any] = list(zip(*rows, strict=True))
        kinds: list[Any] = [np.int64] * 7 + [np.uint64] * 2 + [np.int64] * 5 + [np.bool_] + [np.float64] * 2
        return Batches(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))

    def _step(self, step: int) -> tuple[object, ...]:
        random, shape = self.random, self.shape
        gap, stretch = self._pause(step), self._stretch(step)
        turn = self.turns[step % shape.pp_size]
        dropped = self._disturb(turn)
        empty = gap == 0 and step > 1 and random.random() < odds.EMPTY
        cached = [] if empty else list(turn)
        new: list[Request] = []
        if not empty:
            if self._preempted and random.random() < 0.3:
                back = self._preempted.pop()
                turn.append(back)
                cached.append(back)
            while len(turn) < shape.slots and (not turn or random.random() < 0.2):
                new.append(self._arrive())
                turn.append(new[-1])
        finished, self._finished = self._finished, []
        batch = cached + new
        masked = [request for request in batch if request.chunks]
        k = shape.spec_tokens
        decoding = [request for request in cached if not request.chunks and request.output]
        tokens = sum(CHUNK_TOKENS if request.chunks else 1 for request in batch) + k * len(decoding)
        computed = tuple(request.computed for request in cached)
        self._hash = hash((self._hash, len(finished), tokens, tuple(request.id for request in batch), computed))
        lengths = [request.computed if shape.is_v2 else request.output for request in cached]
        late = [min(request.late, request.output) for request in cached]
        for request in batch:
            self._advance(request, CHUNK_TOKENS if request.chunks else 1 + k)
        done = [request for request in turn if request.output >= request.target]
        if done and not empty:
            self._finished += [request.id for request in done]
            turn[:] = [request for request in turn if request.output < request.target]
        c = self.counts
        c[Oddity.EMPTY] += empty
        c[Oddity.CHUNKED] += bool(masked)
        c[Oddity.ALL_SKIP] += bool(batch) and len(masked) == len(batch) and shape.guarded
        c[Oddity.NEGATIVE_DRIFT] += not shape.is_v2 and any(late)
        c[Oddity.DROPPED_ROWS] += dropped
        # How many are sent is decided by the scheduler's word, too: the same on both sides.
        follow = bool(k) and bool(decoding)
        return (
            len(new), len(cached), len(finished), tokens, len(decoding) if k else 0, len(batch), len(masked),
            (hash(tuple(request.id for request in masked)) & WORD or 1) if masked else 0, self._hash & WORD,
            sum(lengths), max(lengths, default=0), sum(late), min(late, default=0), dropped, follow, gap, stretch,
        )  # fmt: skip

    def _arrive(self) -> Request:
        self._ids += 1
        chunks = self.random.randint(1, 6) if self.random.random() < odds.LONG_PROMPT else 0
        late = self.random.randint(1, 1 + self.shape.spec_tokens) if not self.shape.asynchronous else 0
        return Request(self._ids, chunks, target=self.random.randint(4, 400), late=late)

    def _advance(self, request: Request, tokens: int) -> None:
        if request.chunks:
            request.chunks -= 1
            request.computed += tokens
            return
        if self.shape.asynchronous:
            request.late = 0  # what was lost in a preemption is made up for
        accepted = self.random.randint(1, tokens) if request.output else 1
        request.output += accepted
        request.computed += accepted

    def _disturb(self, turn: list[Request]) -> int:
        """
        Preempt or abort requests of a batch; how many rows of it were received for nothing.
        """
        random, gone = self.random, 0
        if turn and random.random() < odds.PREEMPT:
            request = turn.pop(random.randrange(len(turn)))
            # It comes back as one that ranks know, with what was in flight for it lost, and is read again in chunks.
            request.output = max(0, request.output - random.randint(0, 1 + self.shape.spec_tokens))
            request.computed = 0
            request.chunks = random.randint(0, 3)
            request.late = max(request.late, random.randint(0, 1 + self.shape.spec_tokens))
            self._preempted.append(request)
            self.counts[Oddity.PREEMPTION] += 1
            gone += 1
        if turn and random.random() < odds.ABORT:
            many = random.randint(1, len(turn))
            self._finished += [request.id for request in turn[:many]]
            del turn[:many]
            self.counts[Oddity.ABORT] += many
            gone += many
        return gone if self.shape.is_v2 else 0

    def _pause(self, step: int) -> float:
        """
        Seconds in which no step is taken, before this one.
        """
        random = self.random
        if step == 1:
            return 0.0
        if random.random() < odds.IDLE:
            self.counts[Oddity.IDLE] += 1
            self._finished += [request.id for turn in self.turns for request in turn]
            for turn in self.turns:
                turn.clear()
            return random.uniform(20, 150) if random.random() < odds.IDLE_LONG else random.uniform(0.5, 8)
        if random.random() < odds.DUMMY:
            many = random.randint(1, 60)
            self.counts[Oddity.DUMMY] += many
            return many / self.shape.steps_per_second
        return 0.0

    def _stretch(self, step: int) -> float:
        random = self.random
        if self.shape.warm_up and step <= 8 and (step == 1 or random.random() < 0.2):
            self.counts[Oddity.WARM_UP] += 1
            return random.uniform(10, 40) if step == 1 else random.uniform(2, 30)
        if random.random() < odds.LONG_PREFILL:
            self.counts[Oddity.LONG_PREFILL] += 1
            return random.uniform(1.5, 3.5)
        return 0.0
