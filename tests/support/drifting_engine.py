"""
An engine that drifts, as arithmetic in one process: the step records of its first and last rank until the ranks part.

The lengths follow from what the runner does. Every step counts on all drafts, what was rejected shows two plans later,
a request whose drift is above its drafts is masked on the first rank, and the token that it misses there takes one off.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Guard, Lengths, MitigationState, Phase, Role
from rankscope_exporter.flight.layout import STEP_DTYPE

IDLE_STEPS = 10_000
"""
Steps' time without a request after which a run ends.
"""

Records = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Workload:
    """
    The traffic of an engine, and how well it speculates.
    """

    seed: int
    draft_tokens: int = 3
    acceptance: float = 0.7
    acceptance_spread: float = 0.0
    """Standard deviation of the acceptance from request to request."""
    acceptance_masked: float | None = None
    """Acceptance of requests that are masked, whose input is wrong; None: as before."""
    arrivals: float = 20.0
    """Requests a second."""
    pattern: str = "poisson"
    """`poisson`, `regular`, or `bursts` (busy and quiet seconds take turns)."""
    slots: int = 32
    output_tokens: tuple[int, int] = (20, 120)
    long_prompts: float = 0.05
    """Share of requests whose prompt takes several steps to read."""
    step_seconds: float = 0.03
    fix: bool = False


@dataclass(slots=True)
class Run:
    """
    What came of an engine.
    """

    first: Records
    """Records of the first rank, from step 1."""
    last: Records
    wedged: bool
    """Whether it ended with different guard decisions, at the last record."""

    @property
    def drifting_from(self) -> int | None:
        """Index of the first record with drift; None if there is none."""
        drifting = self.first["drift_max"] > 0
        return int(drifting.argmax()) if drifting.any() else None


@dataclass(slots=True)
class _Rows:
    """The requests that run, a row each; parallel arrays."""

    drift: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    rejected: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Of the last two steps, the older one first."""
    generated: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    """Tokens, as known now, one step later and two steps later."""
    wanted: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    chunks: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Steps that its prompt still takes, this one included."""
    acceptance: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    skipped: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """1 if the first rank masked it in the last step and the last one did not."""

    def keep(self, which: npt.NDArray[np.bool_]) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name)[which])

    def add(self, count: int, **values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> None:
        for name in self.__slots__:
            held = getattr(self, name)
            new = values.get(name, np.zeros((count, *held.shape[1:]), held.dtype))
            setattr(self, name, np.concatenate([held, new]))


def run_engine(workload: Workload, most_steps: int) -> Run:
    """
    Run until the guards differ, at most so many steps.
    """
    chance = np.random.default_rng(workload.seed)
    arrivals = _Arrivals(workload, chance)
    rows, waiting = _Rows(), 0
    now, idle = 1.0, 0
    steps: list[tuple[int, ...]] = []
    begin_ns: list[int] = []
    while len(steps) < most_steps and idle < IDLE_STEPS:
        now += workload.step_seconds * float(chance.lognormal(0.0, 0.15))
        waiting += arrivals.until(now)
        done = rows.generated[:, 0] >= rows.wanted if len(rows.wanted) else np.zeros(0, bool)
        finished = int(done.sum())
        rows.keep(~done)
        new = min(waiting, workload.slots - len(rows.wanted))
        waiting -= new
        if not len(rows.wanted) and not new:
            idle += 1
            continue
        idle = 0
        steps.append(_step(workload, chance, rows, new, finished))
        begin_ns.append(int(now * 1e9))
        requests, masked, reading = steps[-1][4:7]
        if (masked == requests) != (reading == requests):
            break
    first, last = _records(workload, np.array(steps, np.int64), np.array(begin_ns, np.int64))
    return Run(first, last, wedged=bool(first["guard"][-1] != last["guard"][-1]))


def _step(workload: Workload, chance: np.random.Generator, rows: _Rows, new: int, finished: int) -> tuple[int, ...]:
    """
    One step: new, cached and finished requests, those that draft, all; masked on the first and on the last rank; sum and
    largest of the drift, and how many drift.
    """
    k, cached = workload.draft_tokens, len(rows.wanted)
    drafts = np.concatenate([rows.chunks <= 0, np.zeros(new, bool)])
    rows.drift += rows.rejected[:, 0] - rows.skipped
    if workload.fix:
        rows.drift[:] = 0
    if new:
        _admit(workload, chance, rows, new)
    reading = rows.chunks > 1
    over = rows.drift > k
    masked = reading | over
    right = rows.acceptance if workload.acceptance_masked is None else np.where(over, workload.acceptance_masked, rows.acceptance)  # fmt: skip
    good = chance.random((len(masked), k)) < right[:, None]
    accepted = np.logical_and.accumulate(good, axis=1).sum(axis=1) if k else np.zeros(len(masked), np.int64)
    rejected = np.where(drafts, k - accepted, 0)
    tokens = np.where(reading, 0, np.where(drafts, 1 + accepted, 1))
    rows.rejected = np.column_stack([rows.rejected[:, 1], rejected])
    rows.generated = np.column_stack([rows.generated[:, 1], rows.generated[:, 2], rows.generated[:, 2] + tokens])
    rows.skipped = (over & ~reading).astype(np.int64)
    rows.chunks = np.maximum(rows.chunks - 1, 0)
    drift = rows.drift[:cached]
    return (
        *(new, cached, finished, int(drafts.sum()), len(masked)),
        *(int(masked.sum()), int(reading.sum()), int(drift.sum()), int(drift.max(initial=0)), int((drift > 0).sum())),
    )


def _records(
    workload: Workload, rows: npt.NDArray[np.int64], begin_ns: npt.NDArray[np.int64]
) -> tuple[Records, Records]:
    """
    Step records of first and last rank.
    """
    first, last = np.zeros(len(rows), STEP_DTYPE), np.zeros(len(rows), STEP_DTYPE)
    step_ns = int(workload.step_seconds * 1e9)
    for records, masked, role in ((first, rows[:, 5], Role.RECEIVER), (last, rows[:, 6], Role.SENDER)):
        records["step"] = np.arange(1, len(rows) + 1)
        records["begin_ns"] = begin_ns
        records["decide_ns"], records["end_ns"] = begin_ns + step_ns // 2, begin_ns + step_ns * 9 // 10
        for column, name in enumerate(("new", "cached", "finished", "drafting", "requests")):
            records[name] = rows[:, column]
        records["scheduled_tokens"] = rows[:, 4] + workload.draft_tokens * rows[:, 3]
        records["masked"] = masked
        records["guard"] = np.where(masked == rows[:, 4], Guard.SKIP, Guard.BROADCAST)
        records["role"], records["phase"], records["mask_known"] = role, Phase.DONE, 1
        records["lengths"] = Lengths.OUTPUT_TOKENS
        records["mitigation"] = MitigationState.APPLIED if workload.fix else MitigationState.AVAILABLE
    for column, name in enumerate(("drift_sum", "drift_max", "drifting"), start=7):
        first[name] = rows[:, column]
    return first, last


def _admit(workload: Workload, chance: np.random.Generator, rows: _Rows, count: int) -> None:
    long = chance.random(count) < workload.long_prompts
    acceptance = np.full(count, workload.acceptance)
    if workload.acceptance_spread:
        acceptance = np.clip(chance.normal(workload.acceptance, workload.acceptance_spread, count), 0.0, 1.0)
    rows.add(
        count,
        wanted=chance.integers(workload.output_tokens[0], workload.output_tokens[1] + 1, count),
        chunks=np.where(long, chance.integers(3, 6, count), 1),
        acceptance=acceptance,
    )


class _Arrivals:
    """
    Requests as they come in; the first at once.
    """

    def __init__(self, workload: Workload, chance: np.random.Generator) -> None:
        self._workload = workload
        self._chance = chance
        self._next = 0.0
        self._busy_until, self._busy = 0.0, False

    def until(self, now: float) -> int:
        """
        How many came in up to `now`.
        """
        count = 0
        while self._next <= now:
            count += 1
            self._next += self._pause()
        return count

    def _pause(self) -> float:
        mean = 1.0 / self._workload.arrivals
        if self._workload.pattern == "regular":
            return mean
        if self._workload.pattern == "bursts":
            while self._next >= self._busy_until:
                self._busy = not self._busy
                self._busy_until += float(self._chance.exponential(4.0 if self._busy else 1.0)) + 0.05
            mean *= 0.75 if self._busy else 4.0
        return float(self._chance.exponential(mean))
