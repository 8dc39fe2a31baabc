"""
The recorder: turns what the hooks see in a step into one record of the flight file.

It runs inside vLLM's step, so it reads plain Python and NumPy values that are there already, never a device tensor,
and leaves per-request work to the steps in which something is wrong. In a healthy step the lengths that a rank caches
equal the scheduler's list, which one comparison in C tells.

A step goes through `begin` -> `update` -> `enter` -> `decide` -> `leave` -> `end`; each method writes its part of the
record and raises the record's phase. A rank that hangs leaves the phase that it never left. Callers guard each call.
"""

import time
from typing import Any
from zlib import crc32

from rankscope_exporter.contract.words import Guard, MitigationState, Phase
from rankscope_exporter.control import Control
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter, RequestRow

SAMPLE_STEPS = 32
"""
Steps between two samples of lengths into the histograms: a walk over all requests that not every step has to pay.
"""

TRACKED = 4096
"""
Most requests whose first step of drift is remembered.
"""

_BEGUN, _STATE, _DECIDED, _DONE = (
    layout.PART_BEGUN.pack_into,
    layout.PART_STATE.pack_into,
    layout.PART_DECIDED.pack_into,
    layout.PART_DONE.pack_into,
)
_RECORD = layout.STEP_DTYPE.itemsize
_BLANK = bytes(_RECORD)
_PHASE = layout.PHASE_OFFSET
_WIDTH_OFFSET = layout.STEP_DTYPE.fields["width"][1]  # type: ignore[index]  # a structured dtype has fields
_SCHEDULED, _UPDATED, _WAS_DECIDED, _FINISHED = (
    int(Phase.SCHEDULED),
    int(Phase.STATE_UPDATED),
    int(Phase.DECIDED),
    int(Phase.DONE),
)
_APPLIED = int(MitigationState.APPLIED)
_BROADCAST, _SKIP = int(Guard.BROADCAST), int(Guard.SKIP)  # members of an enumeration are slow to compare
_RING, _LIVE_STEP, _OWN_TIME_STEPS = layout.RING_OFFSET, layout.LIVE_STEP, layout.OWN_TIME_STEPS
_now = time.monotonic_ns


def _checksum(*ids: list[str]) -> int:
    """
    A checksum of request ids that is the same in every process; Python's own hash of strings is not.
    """
    return crc32("\n".join(map("\0".join, ids)).encode())


class Recorder:
    """
    Records the steps of one rank; `runner` is the model runner that it reads.

    `completes` says whether a collective call of this rank returns only once the collective is complete, as with
    gloo; where it does not, nothing is ever counted as completed. `last_rank` says whether this is the last
    pipeline rank, which trims by itself; `reads_mask` whether the runner has a mask that it can read.
    """

    __slots__ = (
        "_broadcasts", "_capacity", "_completed", "_completes", "_control", "_drifting", "_expected", "_first_drift", "_flight",
        "_generation", "_guard", "_hash", "_histograms", "_last_rank", "_live", "_members", "_memory", "_names", "_offset", "_own", "_own_total", "_posted", "_reads_mask",
        "_role", "_runner", "_skips", "_state", "_step", "_table_used", "_trimmed", "_width", "_words",
    )  # fmt: skip

    def __init__(
        self,
        runner: Any,
        flight: FlightWriter,
        control: Control,
        *,
        completes: bool,
        last_rank: bool,
        reads_mask: bool = True,
    ) -> None:
        self._runner = runner
        self._flight = flight
        self._memory = flight.memory
        self._words = flight.words
        self._live = flight.live
        self._capacity = flight.capacity
        self._expected = -1
        self._members = self._names = 0
        self._control = control
        self._completes = completes
        self._last_rank = last_rank
        self._reads_mask = reads_mask
        self._step = self._hash = self._own = self._own_total = self._offset = 0
        self._broadcasts = self._skips = self._posted = self._completed = self._trimmed = 0
        self._role = self._guard = self._width = 0
        self._state = int(control.state)
        self._generation = 0
        self._drifting: list[tuple[int, int, int, int, str]] = []
        self._first_drift: dict[str, int] = {}
        self._table_used = False
        self._histograms = flight.memory[
            layout.HISTOGRAM_OFFSET : layout.HISTOGRAM_OFFSET + layout.HISTOGRAM_DTYPE.itemsize
        ].cast("Q")

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
        if word != self._control.settled:
            self._control.follow(word, step)
            self._state = int(self._control.state)
            self._generation = self._control.generation
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
        memory[offset : offset + _RECORD] = (
            _BLANK  # what a later part fails to write is then unknown, not of an older step
        )
        _BEGUN(
            memory, offset, step, self._hash, begin_ns, len(new), len(ids), len(finished), tokens,
            len(scheduler_output.scheduled_spec_decode_tokens), self._generation,
        )  # fmt: skip
        memory[offset + _PHASE] = _SCHEDULED
        self._live[_LIVE_STEP] = step
        self._expected = self._expect(cached) if self._state == _APPLIED else -1
        self._offset = offset
        self._own = _now() - begin_ns if not step % _OWN_TIME_STEPS else 0

    def _expect(self, cached: Any) -> int:
        """
        Tokens that the cached requests will have after the optimistic append, to tell what the trim fix takes off.

        -1 where that cannot be told: on the last rank, which trims without the fix, and in a step that restores requests.
        """
        if self._last_rank or cached.resumed_req_ids or cached.all_token_ids:
            return -1
        requests = self._runner.requests
        states = [requests[r] for r in cached.req_ids]
        return int(sum([len(s.output_token_ids) + s.prev_num_draft_len for s in states]))

    def update(self, scheduler_output: Any) -> None:
        """
        `_update_states` has returned: record request-state lengths against the scheduler's.
        """
        if not self._offset:
            return
        entered = _now() if self._own else 0
        cached = scheduler_output.scheduled_cached_reqs
        requests = self._runner.requests
        lengths = [len(requests[r].output_token_ids) for r in cached.req_ids]
        wanted = cached.num_output_tokens
        total = sum(lengths)
        longest = max(lengths) if lengths else 0
        if self._expected > total:
            self._trimmed += self._expected - total
        memory, offset = self._memory, self._offset
        if lengths == wanted:
            if self._drifting:
                self._drifting = []
            if self._first_drift:
                self._first_drift = {}
            _STATE(
                memory,
                offset + layout.PART_STATE_OFFSET,
                total,
                total,
                0,
                self._trimmed,
                longest,
                longest,
                0,
                0,
                self._state,
                1,
            )
        else:
            drift = [a - b for a, b in zip(lengths, wanted, strict=True)]
            self._drifting = self._find_drifting(scheduler_output, lengths, drift)
            _STATE(
                memory, offset + layout.PART_STATE_OFFSET, total, sum(wanted), sum(drift), self._trimmed, longest, max(wanted),
                max(drift), len(self._drifting), self._state, 1,
            )  # fmt: skip
        memory[offset + _PHASE] = _UPDATED
        if self._step % SAMPLE_STEPS == 0:
            self._sample(lengths, wanted)
        if entered:
            self._own += _now() - entered

    def _find_drifting(
        self, scheduler_output: Any, lengths: list[int], drift: list[int]
    ) -> list[tuple[int, int, int, int, str]]:
        """
        (drift, state length, scheduler length, margin, id) of the requests with drift > 0, worst first.
        """
        cached = scheduler_output.scheduled_cached_reqs
        scheduled, requests = scheduler_output.num_scheduled_tokens, self._runner.requests
        first: dict[str, int] = {}
        found = []
        for i, (request_id, excess) in enumerate(zip(cached.req_ids, drift, strict=True)):
            if excess > 0:
                if len(first) < TRACKED:
                    first[request_id] = self._first_drift.get(request_id, self._step)
                margin = cached.num_computed_tokens[i] + scheduled[request_id] - requests[request_id].num_tokens
                found.append((excess, lengths[i], lengths[i] - excess, margin, request_id))
        self._first_drift = first
        found.sort(reverse=True)
        return found

    def _sample(self, lengths: list[int], wanted: list[int]) -> None:
        words, last = self._histograms, layout.BUCKETS - 1
        for base, values in ((0, lengths), (layout.BUCKETS, wanted)):
            for length in values:
                # bit_length of length - 1 is the index of the first power of two that is not below it
                words[base + (min((length - 1).bit_length() + 1, last) if length > 0 else 0)] += 1
        words[2 * layout.BUCKETS] += sum(lengths)
        words[2 * layout.BUCKETS + 1] += sum(wanted)
        self._live[layout.LIVE_SAMPLES] += 1

    def enter(self, role: int, width: int) -> None:
        """
        The sampled-token collective's method is entered in this `Role`; `width` is 0 where this rank does not know it yet.
        """
        self._role = role
        self._width = width

    def enter_unguarded(self, role: int, width: int) -> None:
        """
        As `enter`, where vLLM has no guard and always posts the collective.
        """
        self.enter(role, width)
        self.decide(skip=False)

    def decide(self, *, skip: bool) -> None:
        """
        The guard of vLLM has answered, `skip` if all requests of the batch are masked; what follows is the collective.

        An answer outside the collective's method, or a second one in the same step, is not a decision.
        """
        if not self._role or self._guard or not self._offset:
            return
        entered = _now()
        runner = self._runner
        rows = runner.input_batch.num_reqs
        flags = bytes(memoryview(runner.discard_request_mask.np)[:rows]) if self._reads_mask else b""
        masked = flags.count(1)
        mask_hash = self._hash_masked(flags) if masked else 0
        if skip:
            self._guard = _SKIP
            self._skips += 1
        else:
            self._guard = _BROADCAST
            self._broadcasts += 1
            self._posted += 1
        memory, offset = self._memory, self._offset
        _DECIDED(
            memory, offset + layout.PART_DECIDED_OFFSET, entered, mask_hash, self._broadcasts, self._skips, self._posted,
            rows, masked, self._width, self._guard, self._role, self._reads_mask,
        )  # fmt: skip
        if self._drifting or self._table_used:
            self._write_table(flags or None)
        memory[offset + _PHASE] = _WAS_DECIDED
        if self._own:
            self._own += _now() - entered

    def _hash_masked(self, flags: bytes) -> int:
        """
        A hash of the masked requests' ids that does not depend on their order or on this process.
        """
        ids = self._runner.input_batch.req_ids
        value = 0
        row = flags.find(1)
        while row >= 0:
            name = ids[row].encode()
            value ^= crc32(name) << 32 | crc32(name, 0x5EED)
            row = flags.find(1, row + 1)
        return value or 1

    def _write_table(self, flags: bytes | None) -> None:
        """
        Publish the drifting requests; `flags` are the rows' mask bytes, None where no guard was evaluated.
        """
        rows: list[RequestRow] = []
        index = self._runner.input_batch.req_id_to_index
        for drift, length, wanted, margin, request_id in self._drifting[: layout.TABLE_CAPACITY]:
            row = index.get(request_id)
            masked = flags[row] if flags is not None and row is not None and row < len(flags) else int(margin < 0)
            name = request_id.encode()[: layout.REQUEST_ID_BYTES]
            rows.append(
                (
                    self._step,
                    self._first_drift.get(request_id, 0),
                    length,
                    wanted,
                    drift,
                    margin,
                    masked,
                    len(name),
                    name,
                )
            )
        self._flight.write_requests(rows, len(self._drifting))
        self._table_used = bool(rows)

    def leave(self, width: int) -> None:
        """
        The collective's method has returned; `width` as this rank posted it, 0 where unknown.
        """
        if self._guard == _BROADCAST and self._completes:
            self._completed += 1
        if width and not self._width and self._offset:
            self._memory[self._offset + _WIDTH_OFFSET] = width & 0xFF
        self._role = 0

    def end(self) -> None:
        """
        The step has left the runner.
        """
        memory, offset = self._memory, self._offset
        if not offset:
            return
        if not self._guard and (self._drifting or self._table_used):
            self._write_table(None)
        self._own_total += self._own
        _DONE(memory, offset + layout.PART_DONE_OFFSET, _now(), self._completed, self._own_total, self._own)
        if not self._guard:
            self._carry_totals(offset)
        memory[offset + _PHASE] = _FINISHED
        self._offset = 0

    def _carry_totals(self, offset: int) -> None:
        """
        A step that came to no decision still carries the totals, with nothing else known.
        """
        _DECIDED(
            self._memory,
            offset + layout.PART_DECIDED_OFFSET,
            0,
            0,
            self._broadcasts,
            self._skips,
            self._posted,
            0,
            0,
            0,
            0,
            0,
            0,
        )
