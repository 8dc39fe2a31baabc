"""
An engine in one process, as arithmetic: what each of its ranks would have recorded, step by step.

Requests, scheduler, request state and mask are those of the simulated ranks (`rankscope_exporter.simulation`), without
their processes and clocks. What a case does to an engine is done to the records afterwards, as its report describes it.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from rankscope_exporter.contract import Guard, Lengths, MitigationState, Phase, RankLife, Role
from rankscope_exporter.flight import layout
from rankscope_exporter.simulation.runner import ModelRunner, Tokens
from rankscope_exporter.simulation.scheduler import Scheduler, SchedulerOutput
from rankscope_exporter.simulation.traffic import Arrival

BOOT_NS = 3_600_000_000_000
"""A node's monotonic clock when its first step begins."""
SECOND_NODE_NS = 7_000_000_000_000
"""How much longer the second node has been up."""
STEP_NS = 40_000_000
IN_FLIGHT = 2
"""Steps that are planned before the first one's verdict is in."""
V2_MESSAGES = 3
"""Sampled tokens, their counts, and drafts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """
    An engine and its traffic.
    """

    seed: int = 1
    pp_size: int = 2
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    runner: str = "V1"
    draft_tokens: int = 3
    acceptance: float = 0.8
    slots: int = 8
    arrivals: float = 0.3
    """Requests per step."""
    prompts: tuple[int, int] = (4, 60)
    outputs: tuple[int, int] = (15, 90)
    long_prompts: float = 0.0
    """Share of requests whose prompt takes several steps to read."""
    fix: bool = False
    """Whether the trim fix is on at every rank."""
    vllm_version: str = "0.27.1"
    async_scheduling: bool = True


@dataclass(slots=True)
class RankTape:
    """
    What one rank leaves behind.
    """

    pp_rank: int
    tp_rank: int
    records: np.ndarray
    life: RankLife = RankLife.RUNNING
    failure: dict[str, Any] | None = None
    hooks: list[dict[str, Any]] | None = None
    """None: all that there are, and on."""
    trim: MitigationState = MitigationState.AVAILABLE
    trim_reason: str = ""
    table: list[tuple[Any, ...]] = field(default_factory=list)
    device: dict[str, int] | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    """What differs in its identity."""

    @property
    def last_step(self) -> int:
        """The last step that it began."""
        return int(self.records["step"][-1]) if len(self.records) else 0

    def at(self, step: int) -> np.ndarray:
        """The record of a step, to be changed."""
        return self.records[step - 1 : step]

    def since(self, step: int) -> np.ndarray:
        """The records from a step on, to be changed."""
        return self.records[step - 1 :]

    def stop_after(self, step: int) -> None:
        """It has left this step, and begins none any more."""
        self.records = self.records[:step].copy()

    def hang(self, step: int, phase: Phase) -> None:
        """It never leaves this phase of this step."""
        self.stop_after(step)
        clear_after(self.records[-1:], phase)

    def fail(self, step: int, phase: Phase, method: str, kind: str) -> None:
        """An error of vLLM ends this step in this phase."""
        self.hang(step, phase)
        self.records["failed"][-1] = 1
        self.failure = {"step": step, "phase": int(phase), "method": method, "kind": kind}


def clear_after(records: np.ndarray, phase: Phase) -> None:
    """
    Take back the parts of records beyond a phase.
    """
    ends = {
        Phase.SCHEDULED: layout.PART_STATE_OFFSET,
        Phase.STATE_UPDATED: layout.PART_DECIDED_OFFSET,
        Phase.DECIDED: layout.PART_DONE_OFFSET,
    }
    raw = records.view(np.uint8).reshape(len(records), layout.STEP_DTYPE.itemsize)
    raw[:, ends[phase] : layout.FAILED_OFFSET] = 0
    records["phase"] = phase


class _Stage:
    """
    The group of one pipeline rank. The runner is driven from outside, so it never asks for anything but its place.
    """

    def __init__(self, *, is_last_rank: bool) -> None:
        self.is_last_rank = is_last_rank

    def broadcast(self, tokens: Tokens) -> None:
        """Never called here."""
        raise NotImplementedError

    def receive(self, shape: tuple[int, int]) -> Tokens:
        """Never called here."""
        raise NotImplementedError


@dataclass(slots=True)
class _Rank:
    pp_rank: int
    runner: ModelRunner
    is_last: bool
    trims: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    """What it recorded of each step, by the names of the fields; the rest is 0."""
    broadcasts: int = 0
    skips: int = 0
    posted: int = 0
    trimmed: int = 0
    first_drift: dict[str, int] = field(default_factory=dict)
    table: list[tuple[Any, ...]] = field(default_factory=list)


class CaseEngine:
    """
    Takes steps until it has taken as many as were asked for, or its ranks part: then it is wedged, as vLLM is.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.random = np.random.default_rng(shape.seed)
        last = shape.pp_size - 1
        self.ranks = [
            _Rank(
                pp,
                ModelRunner(
                    _Stage(is_last_rank=pp == last),
                    slots=shape.slots,
                    draft_tokens=shape.draft_tokens,
                    accept=shape.acceptance,
                ),
                is_last=pp == last,
                trims=shape.fix or pp == last or shape.runner == "V2",
            )
            for pp in range(shape.pp_size)
        ]
        self.scheduler = Scheduler(shape.slots, shape.draft_tokens)
        self.step = 0
        self.hash = 0
        self.parted_at: int | None = None
        """The step at which guard decisions differed."""
        self._number = 0
        self._time = 0
        self._verdicts: deque[tuple[SchedulerOutput, dict[str, int]]] = deque()

    def run(self, steps: int) -> "CaseEngine":
        """
        Take so many steps more.
        """
        end = self.step + steps
        while self.step < end and self.parted_at is None:
            self._time += STEP_NS
            self.scheduler.add(self._arrive())
            plan = self.scheduler.schedule()
            if plan is None:
                continue  # idle: time passes
            self._take(plan)
        return self

    def _arrive(self) -> list[Arrival]:
        shape, random = self.shape, self.random
        arrivals = []
        for _ in range(int(random.poisson(shape.arrivals)) + (self._number == 0)):
            self._number += 1
            prompt = int(random.integers(*shape.prompts, endpoint=True))
            if random.random() < shape.long_prompts:
                prompt = int(random.integers(1200, 3000))
            output = int(random.integers(*shape.outputs, endpoint=True))
            name = f"chatcmpl-{crc32(f'{shape.seed}/{self._number}'.encode()):08x}"
            arrivals.append(Arrival(name, prompt, output, int(random.integers(1 << 31))))
        return arrivals

    def _take(self, plan: SchedulerOutput) -> None:
        self.step += 1
        ids = [*plan.scheduled_cached_reqs.req_ids, *(new.req_id for new in plan.scheduled_new_reqs)]
        told = " ".join(f"{name}:{plan.num_scheduled_tokens[name]}" for name in ids) + "|" + " ".join(sorted(plan.finished_req_ids))  # fmt: skip
        self.hash = (self.hash * 0x100000001B3 ^ crc32(told.encode())) & (1 << 63) - 1
        guards = [self._record(rank, plan) for rank in self.ranks]
        tokens: dict[str, int] = {}
        if plan.total_num_scheduled_tokens:
            last = self.ranks[-1].runner
            sampled = last._sample(plan)
            tokens = dict(zip(last.input_batch.req_ids, (sampled >= 0).sum(axis=1).tolist(), strict=True))
            for rank in self.ranks:
                rank.runner._advance()
        if len(set(guards)) > 1:
            self._wedge(guards)
            return
        self._verdicts.append((plan, tokens))
        if len(self._verdicts) >= IN_FLIGHT:
            self.scheduler.update(*self._verdicts.popleft())

    def _record(self, rank: _Rank, plan: SchedulerOutput) -> int:
        """
        What a rank records of a step, which it does on the way; its guard decision.
        """
        runner, cached, shape = rank.runner, plan.scheduled_cached_reqs, self.shape
        runner._update_states(plan)
        wanted = list(cached.num_output_tokens)
        if rank.trims:
            for name, count in zip(cached.req_ids, wanted, strict=True):
                rank.trimmed += max(0, len(runner.requests[name].output_token_ids) - count)
                del runner.requests[name].output_token_ids[count:]
        begin = BOOT_NS + self._time + rank.pp_rank * STEP_NS // 10 + int(self.random.integers(0, STEP_NS // 20))
        values: dict[str, Any] = {
            "step": self.step, "batch_hash": self.hash, "begin_ns": begin, "new": len(plan.scheduled_new_reqs), "cached": len(cached.req_ids),
            "finished": len(plan.finished_req_ids), "scheduled_tokens": plan.total_num_scheduled_tokens,
            "drafting": len(plan.scheduled_spec_decode_tokens), "end_ns": begin + STEP_NS * 6 // 10, "phase": Phase.DONE,
        }  # fmt: skip
        values |= self._state(rank, plan, wanted)
        guard = Guard.NONE
        if plan.total_num_scheduled_tokens:
            runner._mask_requests(plan)
            names = runner.input_batch.req_ids
            mask = runner.discard_request_mask.np[: len(names)]
            guard = Guard.SKIP if bool(mask.all()) else Guard.BROADCAST
            posts = guard is Guard.BROADCAST
            messages = V2_MESSAGES - (shape.draft_tokens == 0) if shape.runner == "V2" else 1
            rank.broadcasts += posts
            rank.skips += not posts
            rank.posted += messages * posts
            wide = 1 + shape.draft_tokens if shape.runner == "V2" or rank.is_last else 1
            values |= {
                "decide_ns": begin + STEP_NS * 5 // 10, "mask_known": 1, "masked": int(mask.sum()), "requests": len(names), "guard": guard,
                "mask_hash": mask_hash([name for name, flag in zip(names, mask, strict=True) if flag]), "width": wide,
                "role": Role.SENDER if rank.is_last else Role.RECEIVER, "posted": messages * posts,
            }  # fmt: skip
            self._note_table(rank, plan, mask)
        values |= {"broadcasts_total": rank.broadcasts, "skips_total": rank.skips, "posted_total": rank.posted, "completed_total": rank.posted}  # fmt: skip
        rank.rows.append(values)
        return int(guard)

    def _state(self, rank: _Rank, plan: SchedulerOutput, wanted: list[int]) -> dict[str, Any]:
        cached = plan.scheduled_cached_reqs
        if self.shape.runner == "V2":
            computed = cached.num_computed_tokens
            queue = {} if rank.is_last else {"queue_depth": self.shape.pp_size, "queue_filled": min(self.step - 1, self.shape.pp_size)}  # fmt: skip
            total, most = sum(computed), max(computed, default=0)
            return {
                "lengths": Lengths.COMPUTED_TOKENS, "mitigation": MitigationState.NOT_APPLICABLE, "state_sum": total, "scheduler_sum": total,
                "state_max": most, "scheduler_max": most, **queue,
            }  # fmt: skip
        lengths = [len(rank.runner.requests[name].output_token_ids) for name in cached.req_ids]
        drift = [a - b for a, b in zip(lengths, wanted, strict=True)]
        rank.first_drift = {
            name: rank.first_drift.get(name, self.step)
            for name, excess in zip(cached.req_ids, drift, strict=True)
            if excess > 0
        }
        return {
            "lengths": Lengths.OUTPUT_TOKENS, "mitigation": MitigationState.APPLIED if self.shape.fix else MitigationState.AVAILABLE,
            "state_sum": sum(lengths), "scheduler_sum": sum(wanted), "drift_sum": sum(drift), "state_max": max(lengths, default=0),
            "scheduler_max": max(wanted, default=0), "drift_max": max(drift, default=0), "drifting": len(rank.first_drift),
            "trimmed_total": rank.trimmed if self.shape.fix else 0,
        }  # fmt: skip

    def _note_table(self, rank: _Rank, plan: SchedulerOutput, mask: np.ndarray) -> None:
        """
        The requests of this step that drift on a rank, worst first, as rows of its request table.
        """
        cached, runner = plan.scheduled_cached_reqs, rank.runner
        rank.table = []
        for i, name in enumerate(cached.req_ids):
            if name in rank.first_drift:
                length, wanted = len(runner.requests[name].output_token_ids), cached.num_output_tokens[i]
                seen = cached.num_computed_tokens[i] + plan.num_scheduled_tokens[name]
                margin = seen - runner.requests[name].num_tokens
                row = runner.input_batch.req_id_to_index[name]
                raw = name.encode()
                rank.table.append((self.step, rank.first_drift[name], length, wanted, length - wanted, margin, int(mask[row]), len(raw), raw))  # fmt: skip
        rank.table.sort(key=lambda one: -one[4])

    def _wedge(self, guards: list[int]) -> None:
        """
        The last rank posts its broadcast and never comes back; a rank that skipped goes on into the next step, to wait there.
        """
        self.parted_at = self.step
        for rank, guard in zip(self.ranks, guards, strict=True):
            if guard == Guard.BROADCAST:
                rank.rows[-1]["phase"] = Phase.DECIDED
            else:
                later = rank.rows[-1] | {
                    "step": self.step + 1,
                    "batch_hash": self.hash ^ 1,
                    "phase": Phase.STATE_UPDATED,
                }
                rank.rows.append(later | {"begin_ns": later["begin_ns"] + STEP_NS})

    def tapes(self) -> list[RankTape]:
        """
        What all ranks leave behind, in order (pp, tp). Tensor-parallel ranks of a stage do the same, some time apart.
        """
        shape = self.shape
        trim = MitigationState.APPLIED if shape.fix else MitigationState.AVAILABLE
        tapes = []
        for rank in self.ranks:
            records = np.zeros(len(rank.rows), layout.STEP_DTYPE)
            for name in layout.STEP_DTYPE.names or ():
                if name != "reserved":
                    records[name] = [row.get(name, 0) for row in rank.rows]
            if rank.rows and rank.rows[-1]["phase"] < Phase.DONE:
                clear_after(records[-1:], rank.rows[-1]["phase"])
            for tp in range(shape.tp_size):
                shifted = records.copy()
                for name in ("begin_ns", "decide_ns", "end_ns"):
                    shifted[name][shifted[name] > 0] += tp * 100_000
                v2 = MitigationState.NOT_APPLICABLE if shape.runner == "V2" else trim
                tapes.append(RankTape(rank.pp_rank, tp, shifted, trim=v2, table=list(rank.table)))
        return tapes


def mask_hash(names: list[str]) -> int:
    """
    A hash of the masked requests' ids that does not depend on their order; 0 if none is.
    """
    value = 0
    for name in names:
        value ^= crc32(name.encode()) << 32 | crc32(name.encode(), 0xCA5E)
    return value
