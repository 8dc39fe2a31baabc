"""
What the ranks of a made engine record of its steps, and when.

A tape is a flight file as its exporter reads it at any moment: whole records, and the newest one as far as it is
written. Times are seconds of the simulated world; records carry nanoseconds of their node's clock.
"""

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import sim_oddities as odds
from sim_oddities import Counts, Oddity
from sim_shape import Shape
from sim_steps import Batches

from rankscope_exporter.contract import (
    ControlOutcome,
    ControlReport,
    Guard,
    HookReport,
    Lengths,
    MitigationReport,
    MitigationState,
    Phase,
    RankLife,
    RankReport,
    Role,
    StepFailure,
)
from rankscope_exporter.flight import layout
from rankscope_server.domain.model import RankId

Times = npt.NDArray[np.float64]
Records = npt.NDArray[np.void]

NEVER = math.inf
REACHES = {
    Phase.SCHEDULED: layout.PART_STATE_OFFSET,
    Phase.STATE_UPDATED: layout.PART_DECIDED_OFFSET,
    Phase.DECIDED: layout.PART_DONE_OFFSET,
}
SAMPLED_MESSAGES = 2
"""Collectives of a V2 exchange before the drafts."""


@dataclass(frozen=True, slots=True)
class Toggle:
    """
    A command for a rank: when its word was written, and what the rank makes of it.
    """

    put: float
    generation: int
    desired: bool
    effective_step: int
    acts_at: int
    """Ordinal of the step at which the rank acts."""
    outcome: ControlOutcome
    before: MitigationState
    after: MitigationState


@dataclass(slots=True, eq=False)
class Tape:
    """
    One rank: its records as they are in the end, and when each part of them is written.
    """

    key: str
    id: RankId
    node: int
    report: RankReport
    shape: Shape
    records: Records
    begin: Times
    """When steps begin; NEVER from the first one on that does not."""
    state: Times
    decide: Times
    """NEVER where the rank comes to no decision."""
    end: Times
    born: float
    gone: float = NEVER
    removed: float = NEVER
    """When the file is removed."""
    stops: list[tuple[float, float]] = field(default_factory=list)
    """When the process is stopped, and when it goes on."""
    toggles: list[Toggle] = field(default_factory=list)
    failed_at: float = NEVER
    """When an error of vLLM ended its last step."""
    hooks_later: tuple[float, list[HookReport]] = (NEVER, [])
    """Hooks as they are from a moment on."""
    delivered: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """Steps of which the server has the whole record."""

    def __post_init__(self) -> None:
        self.delivered = np.zeros(len(self.records), bool)

    def newest(self, at: float) -> int:
        """
        Ordinal of the last step begun; 0 before the first.
        """
        return int(np.searchsorted(self.begin, at, "right"))

    def begins(self, at: float) -> bool:
        """
        Whether the rank is just beginning a step, and will come further in it.
        """
        row = self.newest(at) - 1
        return row >= 0 and bool(at < self.state[row] < NEVER)

    def phase_of(self, step: int, at: float) -> Phase:
        """
        How far the rank has come in a step that it has begun.
        """
        row = step - 1
        if self.end[row] <= at:
            return Phase.DONE
        if self.decide[row] <= at:
            return Phase.DECIDED
        return Phase.STATE_UPDATED if self.state[row] <= at else Phase.SCHEDULED

    def life(self, at: float) -> RankLife:
        """
        What can be told of the process.
        """
        if at >= self.gone:
            return RankLife.GONE
        return RankLife.STOPPED if any(a <= at < b for a, b in self.stops) else RankLife.RUNNING

    def failed(self, at: float) -> bool:
        """
        Whether its last step has ended in an error.
        """
        return self.failed_at <= at

    def read(self, at: float, after: int) -> Records:
        """
        The records that the ring holds at a moment, of steps later than `after`.
        """
        last = self.newest(at)
        first = max(after + 1, last - self.shape.ring + 1, 1)
        if first > last:
            return self.records[:0]
        records = self.records[first - 1 : last].copy()
        phase = self.phase_of(last, at)
        if phase < Phase.DONE:
            raw = records.view(np.uint8).reshape(len(records), layout.STEP_DTYPE.itemsize)
            raw[-1, REACHES[phase] :] = 0
            records["phase"][-1] = phase
            records["failed"][-1] = self.failed(at)
            if phase is Phase.DECIDED and self.shape.is_v2 and records["role"][-1] == Role.SENDER:
                drafts = max(0, int(records["posted"][-1]) - SAMPLED_MESSAGES)  # sent once it has them
                records["posted"][-1] -= drafts
                records["posted_total"][-1] -= drafts
        return records

    def mitigation(self, at: float) -> MitigationState:
        """
        Where the trim fix stands.
        """
        state = self.report.mitigations[0].state
        for toggle in self.toggles:
            if self._acted(toggle, at):
                state = toggle.after
        return state

    def _acted(self, toggle: Toggle, at: float) -> bool:
        return toggle.acts_at <= len(self.begin) and bool(self.begin[toggle.acts_at - 1] <= at)

    def control(self, at: float) -> ControlReport:
        """
        What the rank has made of the last command by now.
        """
        sent = [toggle for toggle in self.toggles if toggle.put <= at]
        if not sent:
            return self.report.control
        requested = sent[-1]
        seen = [toggle for toggle in sent if self.newest(at) > self.newest(toggle.put)]
        observed = seen[-1] if seen else None
        acted = [toggle for toggle in seen if self._acted(toggle, at)]
        outcome = ControlOutcome.NONE
        if observed is not None:
            outcome = observed.outcome if observed in acted else ControlOutcome.PENDING
        return ControlReport(
            requested_generation=requested.generation,
            observed_generation=observed.generation if observed else 0,
            desired=requested.desired,
            effective_step=requested.effective_step,
            acted_step=acted[-1].acts_at if acted else 0,
            outcome=outcome,
        )

    def report_at(self, at: float) -> RankReport:
        """
        The rank as `/v1/ranks` shows it.
        """
        last = self.newest(at)
        changes: dict[str, Any] = {
            "life": self.life(at),
            "step": last,
            "phase": self.phase_of(last, at) if last else Phase.DONE,
        }
        if self.toggles:
            state = self.mitigation(at)
            reason = "it raised" if any(t.outcome is ControlOutcome.FAILED for t in self.toggles) else ""
            changes["mitigations"] = [MitigationReport(mitigation="trim", state=state, reason=reason)]
            changes["control"] = self.control(at)
        if self.failed(at):
            changes["failure"] = StepFailure(
                step=last, phase=self.phase_of(last, at), method="execute_model", kind="AssertionError"
            )
        if self.hooks_later[0] <= at:
            changes["hooks"] = self.hooks_later[1]
        if self.report.device is not None and last >= self.report.device.every:
            every = self.report.device.every
            changes["device"] = self.report.device.model_copy(
                update={"step": last - last % every, "samples": last // every}
            )
        return self.report.model_copy(update=changes)

    def freeze(self, at: float) -> None:
        """
        Nothing more happens on this rank from a moment on.
        """
        for times in (self.begin, self.state, self.decide, self.end):
            times[times > at] = NEVER


@dataclass(frozen=True, slots=True)
class Clockwork:
    """
    When each rank goes through each step; arrays of (ranks, steps).
    """

    begin: Times
    state: Times
    decide: Times
    end: Times


@dataclass(frozen=True, slots=True)
class Pauses:
    """
    Moments in which one rank stands still, by (rank, step): the part of the step in which it does, and the seconds.
    """

    held: dict[tuple[int, int], tuple[int, float]]
    stopped: dict[tuple[int, int], float]
    """Those in which the process is seen stopped."""


def draw_pauses(shape: Shape, steps: int, random: Random, counts: Counts) -> Pauses:
    """
    Long garbage collections, and profilers that stop a process for a moment.
    """
    held: dict[tuple[int, int], tuple[int, float]] = {}
    stopped: dict[tuple[int, int], float] = {}
    for step in range(steps):
        if random.random() < odds.GC_PAUSE:
            held[random.randrange(len(shape.places)), step] = random.randint(0, 2), random.uniform(0.5, 2.0)
            counts[Oddity.GC_PAUSE] += 1
        elif random.random() < odds.PAUSE:
            rank, seconds = random.randrange(len(shape.places)), random.uniform(0.1, 1.5)
            held[rank, step] = 1, seconds
            stopped[rank, step] = seconds
            counts[Oddity.PAUSED] += 1
    return Pauses(held, stopped)


def run_clockwork(
    shape: Shape, batches: Batches, start: float, pauses: Pauses, noise: np.random.Generator
) -> Clockwork:
    """
    Take every step: a rank begins one when it is told to and done with the last, and decides when its stage has computed.

    The scheduler tells all ranks at once, `depth` steps ahead at most. What an earlier stage hands over is waited for, and
    where collectives block, so is the last stage.
    """
    places, steps = shape.places, len(batches)
    period = 1.0 / shape.steps_per_second
    compute = (period * noise.lognormal(-0.1, 0.3, (steps, shape.pp_size))).tolist()
    told = noise.exponential(period / 20, (steps, len(places))).tolist()
    small = (period * noise.uniform(0.005, 0.03, (steps, len(places)))).tolist()
    gaps, stretches = batches.gap.tolist(), batches.stretch.tolist()
    times: list[list[list[float]]] = [[[] for _ in places] for _ in range(4)]
    begin, state, decide, end = times
    last_end = [start] * len(places)
    issue, held = start, pauses.held
    decides = (batches.requests > 0).tolist()
    for step in range(steps):
        if step >= shape.depth:
            issue = max(issue, end[-1][step - shape.depth])
        if gaps[step]:
            issue = max(issue, *last_end) + gaps[step]
        handed = issue
        ready: list[float] = []
        for stage in range(shape.pp_size):
            out = handed
            for tp in range(shape.tp_size):
                rank = stage * shape.tp_size + tp
                part, seconds = held.get((rank, step), (-1, 0.0))
                began = max(issue + told[step][rank], last_end[rank]) + (seconds if part == 0 else 0.0)
                updated = began + small[step][rank]
                begin[rank].append(began)
                state[rank].append(updated)
                out = max(out, updated + (seconds if part == 1 else 0.0))
            handed = out + compute[step][stage] + stretches[step] / shape.pp_size
            ready.append(handed)
        decided = [ready[pp] + small[step][rank] for rank, (pp, _) in enumerate(places)]
        for rank in range(len(places)):
            part, seconds = held.get((rank, step), (-1, 0.0))
            left = decided[rank]
            if shape.blocking and decides[step]:
                left = max(left, decided[-1], decided[rank % shape.tp_size - shape.tp_size])
            left += small[step][rank] + (seconds if part == 2 else 0.0)
            decide[rank].append(decided[rank] if decides[step] else NEVER)
            end[rank].append(left)
            last_end[rank] = left
    return Clockwork(*(np.array(rows) for rows in times))


def draw_transients(shape: Shape, steps: int, random: Random) -> list[tuple[int, int]]:
    """
    Steps at which one rank counts its drafts too early, by one step: (rank, index of the step).

    Never two within the reach of one batch's turns on one rank: that is what drift is.
    """
    found: list[tuple[int, int]] = []
    if shape.is_v2 or not shape.spec_tokens:
        return found
    last: dict[int, int] = {}
    for step in range(steps):
        rank = random.randrange(len(shape.places))
        if random.random() < odds.TRANSIENT and step - last.get(rank, -steps) > 2 * shape.pp_size + 2:
            last[rank] = step
            found.append((rank, step))
    return found


def write_records(
    shape: Shape, batches: Batches, clockwork: Clockwork, rank: int, clock_ns: int, transients: list[tuple[int, int]]
) -> Records:
    """
    The records of a rank, all steps done, by the clock of its node, which stands at `clock_ns` at second 0.
    """
    pp_rank, _ = shape.places[rank]
    steps, last = len(batches), pp_rank == shape.pp_size - 1
    records = np.zeros(steps, layout.STEP_DTYPE)
    records["step"] = np.arange(1, steps + 1)
    records["batch_hash"] = batches.batch_hash
    for field_name, times in (("begin_ns", clockwork.begin), ("end_ns", clockwork.end)):
        records[field_name] = (times[rank] * 1e9).astype(np.int64) + clock_ns
    for name in ("new", "cached", "finished", "drafting"):
        records[name] = getattr(batches, name)
    records["scheduled_tokens"] = batches.tokens
    late = np.zeros(steps, np.int64) if shape.is_v2 or last else batches.late_sum
    least = np.zeros(steps, np.int64) if shape.is_v2 or last else batches.late_max
    early = np.zeros(steps, np.int64)
    for of, step in transients:
        if of == rank and batches.cached[step]:
            early[step] = shape.spec_tokens
    if not shape.is_v2 or shape.guarded:  # early V2 releases keep no lengths on the host
        records["lengths"] = Lengths.COMPUTED_TOKENS if shape.is_v2 else Lengths.OUTPUT_TOKENS
        records["scheduler_sum"], records["scheduler_max"] = batches.length_sum, batches.length_max
        records["drift_sum"] = early - late
        records["drift_max"] = np.where(early > 0, early, -least)
        records["drifting"] = early > 0
        records["state_sum"] = batches.length_sum + records["drift_sum"]
        records["state_max"] = np.maximum(batches.length_max + records["drift_max"], 0)
    records["mitigation"] = shape.mitigation
    if shape.is_v2:
        records["dropped_total"] = np.cumsum(batches.dropped)
        if not last:
            records["queue_depth"] = shape.pp_size
            records["queue_filled"] = np.minimum(np.arange(steps), shape.pp_size)
    decided = batches.requests > 0
    records["decide_ns"] = np.where(
        decided, (np.where(decided, clockwork.decide[rank], 0) * 1e9).astype(np.int64) + clock_ns, 0
    )
    records["requests"] = batches.requests
    skips = decided & shape.guarded & (batches.masked == batches.requests)
    records["guard"] = np.where(decided, np.where(skips, Guard.SKIP, Guard.BROADCAST), Guard.NONE)
    if shape.masked:
        records["masked"], records["mask_hash"], records["mask_known"] = batches.masked, batches.mask_hash, decided
    role = Role.SENDER if last else Role.RECEIVER
    records["role"] = np.where(decided, role, Role.NONE)
    wide = shape.spec_tokens + 1 if shape.is_v2 or last else 1  # V1 receivers keep one column of what they are sent
    records["width"] = np.where(records["guard"] == Guard.BROADCAST, wide, 0)
    messages = SAMPLED_MESSAGES + batches.drafts_follow if shape.is_v2 else np.ones(steps, np.int64)
    records["posted"] = np.where(records["guard"] == Guard.BROADCAST, messages, 0)
    records["phase"] = Phase.DONE
    return records


def write_totals(tape: Tape) -> None:
    """
    Bring the counts since the start up to what the records say.
    """
    records = tape.records
    records["broadcasts_total"] = np.cumsum(records["guard"] == Guard.BROADCAST)
    records["skips_total"] = np.cumsum(records["guard"] == Guard.SKIP)
    records["posted_total"] = np.cumsum(records["posted"].astype(np.int64))
    if tape.shape.blocking:
        records["completed_total"] = records["posted_total"]
    elif tape.shape.is_v2:  # a receive is known to be complete when its slot is used
        behind = tape.shape.pp_size
        records["completed_total"][behind:] = records["posted_total"][:-behind]


def sampled_stops(tape: Tape, pauses: Pauses, rank: int) -> None:
    """
    Note when the process of a rank is seen stopped.
    """
    for (of, step), seconds in pauses.stopped.items():
        if of == rank:
            after = float(tape.state[step])
            tape.stops.append((after, after + seconds))
