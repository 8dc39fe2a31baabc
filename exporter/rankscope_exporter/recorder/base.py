"""
What the recorders of both model runners have in common.

A step goes through `begin` -> `update` -> `enter` -> `decide` -> `leave` -> `end`; each method writes its part of the
record and raises the record's phase. A rank that hangs leaves the phase that it never left, and `fail` marks the step
that an error of vLLM ended. Callers guard each call.
"""

import time
from typing import Any, ClassVar
from zlib import crc32

from rankscope_exporter.contract.words import Detail, Guard, MitigationState, Phase
from rankscope_exporter.control import Control
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter, RequestRow
from rankscope_exporter.recorder.options import RecorderOptions

SAMPLE_STEPS = 64
"""
Steps between two samples of lengths into the histograms, and two looks around: what not every step has to pay. A
multiple of `layout.OWN_TIME_STEPS`, so that its cost is seen.
"""

TRACKED = 4096
"""
Most requests whose first step of drift is remembered.
"""

BROADCAST, SKIP = int(Guard.BROADCAST), int(Guard.SKIP)  # members of an enumeration are slow to compare

_BEGUN, _DECIDED, _DONE = layout.RECORD_BEGUN.pack_into, layout.PART_DECIDED.pack_into, layout.PART_DONE.pack_into
_RECORD = layout.STEP_DTYPE.itemsize
_PHASE = layout.PHASE_OFFSET
_FIELDS: Any = layout.STEP_DTYPE.fields
_WIDTH_OFFSET, _POSTED_OFFSET, _POSTED_TOTAL_OFFSET = (_FIELDS[name][1] for name in ("width", "posted", "posted_total"))
_SCHEDULED, _WAS_DECIDED, _FINISHED = int(Phase.SCHEDULED), int(Phase.DECIDED), int(Phase.DONE)
_APPLIED = int(MitigationState.APPLIED)
_LONGEST_OWN = (1 << 32) - 1
_RING, _LIVE_STEP, _OWN_TIME_STEPS = layout.RING_OFFSET, layout.LIVE_STEP, layout.OWN_TIME_STEPS
_now = time.monotonic_ns

Drifting = tuple[int, int, int, int, str]
"""
Drift, request-state length, scheduler's length, margin and id of a request with drift > 0.
"""


def _checksum(*ids: list[str]) -> int:
    """
    A checksum of request ids that is the same in every process; Python's own hash of strings is not.
    """
    return crc32("\n".join(map("\0".join, ids)).encode())


def hash_ids(ids: list[str], flags: bytes) -> int:
    """
    A hash of the ids whose byte in `flags` is 1, which does not depend on their order or on this process; 0 if none is.
    """
    value = 0
    row = flags.find(1)
    if row < 0:
        return 0
    while row >= 0:
        name = ids[row].encode()
        value ^= crc32(name) << 32 | crc32(name, 0x5EED)
        row = flags.find(1, row + 1)
    return value or 1


class Recorder:
    """
    Records the steps of one rank; `runner` is the model runner that it reads.
    """

    HOOKS: ClassVar[tuple[str, str, str]]
    """Hook points whose bodies are `begin`, `update` and `decide`."""

    __slots__ = (
        "_broadcasts", "_budget", "_capacity", "_completed", "_completes", "_control", "_detailed", "_drifting", "_expected", "_failed", "_first_drift",
        "_flight", "_generation", "_guard", "_hash", "_last_rank", "_lengths", "_live", "_look_around", "_members", "_memory", "_name", "_names", "_offset", "_own", "_own_begin",
        "_own_decide", "_own_steps", "_own_total", "_own_update", "_posted", "_posted_now", "_role", "_runner", "_settled", "_skips", "_state", "_step", "_table_used",
        "_trimmed", "_width", "_words",
    )  # fmt: skip

    def __init__(self, runner: Any, flight: FlightWriter, control: Control, options: RecorderOptions) -> None:
        self._runner = runner
        self._flight = flight
        self._memory = flight.memory
        self._words = flight.words
        self._live = flight.live
        self._capacity = flight.capacity
        self._lengths = flight.lengths
        self._own_steps = flight.own
        self._control = control
        self._completes = options.completes
        self._last_rank = options.last_rank
        self._name = options.name
        self._budget = options.budget
        self._failed = options.failed
        self._look_around = options.look_around
        self._expected = -1
        self._members = self._names = 0
        self._step = self._hash = self._offset = 0
        self._own = self._own_total = self._own_begin = self._own_update = self._own_decide = 0
        self._broadcasts = self._skips = self._posted = self._posted_now = self._completed = self._trimmed = 0
        self._role = self._guard = self._width = 0
        self._state = int(control.state)
        self._settled = control.settled
        self._generation = 0
        self._drifting: list[Drifting] = []
        self._first_drift: dict[str, int] = {}
        self._table_used = False
        self._detailed = True

    @property
    def step(self) -> int:
        """
        Ordinal of the last step that began.
        """
        return self._step

    def begin(self, scheduler_output: Any) -> None:
        """
        `execute_model` is entered: count the step, follow the control word, record what the scheduler said.
        """
        begin_ns = _now()
        self._offset = self._role = self._guard = self._width = 0
        step = self._step = self._step + 1
        word = self._words[0]
        if word != self._settled:
            control = self._control
            control.follow(word, step)
            self._settled = control.settled
            self._state = int(control.state)
            self._generation = control.generation
        cached = scheduler_output.scheduled_cached_reqs
        ids = cached.req_ids
        new = scheduler_output.scheduled_new_reqs
        finished = scheduler_output.finished_req_ids
        tokens = scheduler_output.total_num_scheduled_tokens
        # Who is in the batch is hashed when that may have changed, and every few steps; how far they are, always.
        if new or finished or len(ids) != self._members or cached.resumed_req_ids or not step % SAMPLE_STEPS:
            self._members = len(ids)
            self._names = _checksum(ids, [r.req_id for r in new], sorted(finished))
        self._hash = hash(
            (self._hash, self._names, tokens, tuple(cached.num_computed_tokens), tuple(cached.num_output_tokens))
        )
        offset = _RING + step % self._capacity * _RECORD
        memory = self._memory
        memory[offset + _PHASE] = 0  # first: readers leave the record alone from here on
        _BEGUN(
            memory, offset, step, self._hash, begin_ns, len(new), len(ids), len(finished), tokens,
            len(scheduler_output.scheduled_spec_decode_tokens), self._generation,
        )  # fmt: skip
        memory[offset + _PHASE] = _SCHEDULED
        self._live[_LIVE_STEP] = step
        self._expected = self._expect(cached) if self._state == _APPLIED else -1
        self._offset = offset
        if step % _OWN_TIME_STEPS:
            self._own = 0
            return
        if not step % SAMPLE_STEPS:
            self._look_around()
        self._own = self._own_begin = _now() - begin_ns

    def _expect(self, cached: Any) -> int:  # noqa: ARG002  for runners with something to trim
        """
        Tokens that the cached requests will have after the optimistic append, to tell what the trim fix takes off; -1 if unknown.
        """
        return -1

    def update(self, scheduler_output: Any) -> None:
        """
        The runner has updated its request state: record its lengths against the scheduler's.
        """
        raise NotImplementedError

    def _sample(self, lengths: list[int], wanted: list[int]) -> None:
        words, last = self._lengths, layout.BUCKETS - 1
        for base, values in ((0, lengths), (layout.BUCKETS, wanted)):
            for length in values:
                # bit_length of length - 1 is the index of the first power of two that is not below it
                words[base + (min((length - 1).bit_length() + 1, last) if length > 0 else 0)] += 1
        words[2 * layout.BUCKETS] += sum(lengths)
        words[2 * layout.BUCKETS + 1] += sum(wanted)
        self._live[layout.LIVE_SAMPLES] += 1

    def _first_step(self, request_id: str, first: dict[str, int]) -> None:
        """
        Remember in `first` since which step a request drifts.
        """
        if len(first) < TRACKED:
            first[request_id] = self._first_drift.get(request_id, self._step)

    def enter(self, role: int, width: int) -> None:
        """
        The rank comes to the sampled-token exchange in this `Role`; `width` is 0 where it does not know it yet.
        """
        self._role = role
        self._width = width

    def _publish_decision(
        self, decide_ns: int, rows: int, flags: bytes | None, masked: int, mask_hash: int, posted: int
    ) -> None:
        """
        Write what this rank decided: `posted` collectives follow, none if it skips. `flags` are the rows' mask bytes, None if unknown.
        """
        if posted:
            self._guard = BROADCAST
            self._broadcasts += 1
            self._posted += posted
            self._posted_now = posted
        else:
            self._guard = SKIP
            self._skips += 1
        memory, offset = self._memory, self._offset
        _DECIDED(
            memory, offset + layout.PART_DECIDED_OFFSET, decide_ns, mask_hash, self._broadcasts, self._skips, self._posted,
            rows, masked, self._width, self._guard, self._role, flags is not None, posted,
        )  # fmt: skip
        if self._drifting or self._table_used:
            self._write_table(flags)
        memory[offset + _PHASE] = _WAS_DECIDED
        if self._own:
            self._own_decide = _now() - decide_ns
            self._own += self._own_decide

    def _post_more(self, collectives: int) -> None:
        """
        This rank posts further collectives of the step's exchange.
        """
        if self._guard != BROADCAST or not self._offset:
            return
        self._posted += collectives
        self._posted_now += collectives
        memory, offset = self._memory, self._offset
        memory[offset + _POSTED_OFFSET] = self._posted_now
        layout.WORD.pack_into(memory, offset + _POSTED_TOTAL_OFFSET, self._posted)

    def _write_table(self, flags: bytes | None) -> None:
        """
        Publish the drifting requests; `flags` are the rows' mask bytes, None where they are unknown.
        """
        if not self._detailed:
            return
        rows: list[RequestRow] = []
        index = self._row_index()
        for drift, length, wanted, margin, request_id in self._drifting[: layout.TABLE_CAPACITY]:
            row = index.get(request_id)
            masked = flags[row] if flags is not None and row is not None and row < len(flags) else int(margin < 0)
            name = self._name(request_id)
            first = self._first_drift.get(request_id, 0)
            rows.append((self._step, first, length, wanted, drift, margin, masked, len(name), name))
        self._flight.write_requests(rows, len(self._drifting))
        self._table_used = bool(rows)

    def _row_index(self) -> dict[str, int]:
        """
        Row of each request in the batch whose mask bytes `_write_table` is given.
        """
        return {}

    def reduce(self, detail: Detail) -> None:
        """
        Record less from now on: no request table and no histograms. Rows that stand in the table are taken out.
        """
        self._detailed = False
        self._live[layout.LIVE_DETAIL] = int(detail)
        self._flight.write_requests([], 0)

    def leave(self, width: int) -> None:
        """
        The exchange's method has returned; `width` as this rank posted it, 0 where unknown.
        """
        if self._completes:
            self._completed = self._posted
        if width and not self._width and self._offset:
            self._width = width
            layout.HALF.pack_into(self._memory, self._offset + _WIDTH_OFFSET, width)
        self._role = 0  # the guard may be asked for other ends after it

    def end(self) -> None:
        """
        The step has left the runner.
        """
        memory, offset = self._memory, self._offset
        if not offset:
            return
        if not self._guard:
            if self._drifting or self._table_used:
                self._write_table(None)
            self._carry_totals(offset)
        own = self._own
        if own:
            own = min(own, _LONGEST_OWN)  # a process that is stopped in the middle of it takes any time
            self._own_total += own
            self._record_own(own)
        _DONE(memory, offset + layout.PART_DONE_OFFSET, _now(), self._completed, self._own_total, own)
        memory[offset + _PHASE] = _FINISHED
        self._offset = 0

    def _record_own(self, own: int) -> None:
        words = self._own_steps
        words[min((own // 1000).bit_length(), layout.OWN_BUCKETS - 1)] += 1
        words[layout.OWN_BUCKETS] += own
        spent = (self._own_begin, self._own_update, self._own_decide)
        self._own_update = self._own_decide = 0
        self._budget.spend(own, zip(self.HOOKS, spent, strict=True))

    def _carry_totals(self, offset: int) -> None:
        """
        A step that came to no decision still carries the totals, with nothing else known.
        """
        _DECIDED(
            self._memory, offset + layout.PART_DECIDED_OFFSET, 0, 0, self._broadcasts, self._skips, self._posted,
            0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def fail(self, method: str, error: BaseException) -> None:
        """
        An error of vLLM came out of `method` and ends the step: it keeps its phase, and is marked.
        """
        offset = self._offset
        if not offset:
            return
        memory = self._memory
        memory[offset + layout.FAILED_OFFSET] = 1
        self._live[layout.LIVE_FAILED_STEP] = self._step
        self._live[layout.LIVE_FAILED_STEPS] += 1
        self._offset = 0
        self._failed(self._step, memory[offset + _PHASE], method, error)
