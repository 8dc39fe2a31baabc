"""
Recording the V1 model runner: it caches the output tokens of each request, and its discard mask decides the guard.

In a healthy step the lengths that a rank caches equal the scheduler's list, which one comparison in C tells.
"""

import time
from typing import Any

from rankscope_exporter.contract.words import Lengths, Phase
from rankscope_exporter.control import Control
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_exporter.recorder.base import SAMPLE_STEPS, Drifting, Recorder, hash_ids
from rankscope_exporter.recorder.options import RecorderOptions

_STATE, _EQUAL = layout.PART_STATE.pack_into, layout.PART_STATE_EQUAL.pack_into
_STATE_OFFSET, _PHASE = layout.PART_STATE_OFFSET, layout.PHASE_OFFSET
_UPDATED, _OUTPUT = int(Phase.STATE_UPDATED), int(Lengths.OUTPUT_TOKENS)
_now = time.monotonic_ns


class V1Recorder(Recorder):
    """
    `reads_mask` says whether the runner has a mask that can be read.
    """

    HOOKS = ("execute_model", "_update_states", "_is_all_reqs_chunked_prefill")

    __slots__ = ("_mask", "_mask_view", "_reads_mask")

    def __init__(
        self, runner: Any, flight: FlightWriter, control: Control, options: RecorderOptions, *, reads_mask: bool = True
    ) -> None:
        super().__init__(runner, flight, control, options)
        self._reads_mask = reads_mask
        self._mask: Any = None
        self._mask_view: Any = None
        """The mask as something that is quick to copy from."""

    def _expect(self, cached: Any) -> int:
        """
        -1 also on the last rank, which trims without the fix, and in a step that restores requests.
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
                self._first_drift = {}
            _EQUAL(
                memory,
                offset + _STATE_OFFSET,
                total,
                total,
                self._trimmed,
                0,
                longest,
                longest,
                self._state,
                _OUTPUT,
                0,
                0,
            )
        else:
            drift = [a - b for a, b in zip(lengths, wanted, strict=True)]
            self._drifting = self._find_drifting(scheduler_output, lengths, drift)
            _STATE(
                memory, offset + _STATE_OFFSET, total, sum(wanted), sum(drift), self._trimmed, 0, longest, max(wanted),
                max(drift), len(self._drifting), self._state, _OUTPUT, 0, 0,
            )  # fmt: skip
        memory[offset + _PHASE] = _UPDATED
        if entered:  # the steps that are sampled are among those that are measured
            if self._step % SAMPLE_STEPS == 0 and self._detailed:
                self._sample(lengths, wanted)
            self._own_update = _now() - entered
            self._own += self._own_update

    def _find_drifting(self, scheduler_output: Any, lengths: list[int], drift: list[int]) -> list[Drifting]:
        """
        The requests with drift > 0, worst first.
        """
        cached = scheduler_output.scheduled_cached_reqs
        scheduled, requests = scheduler_output.num_scheduled_tokens, self._runner.requests
        first: dict[str, int] = {}
        found = []
        for i, (request_id, excess) in enumerate(zip(cached.req_ids, drift, strict=True)):
            if excess > 0:
                self._first_step(request_id, first)
                margin = cached.num_computed_tokens[i] + scheduled[request_id] - requests[request_id].num_tokens
                found.append((excess, lengths[i], lengths[i] - excess, margin, request_id))
        self._first_drift = first
        found.sort(reverse=True)
        return found

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
        batch = self._runner.input_batch
        rows = batch.num_reqs
        flags = None
        if self._reads_mask:
            mask = self._runner.discard_request_mask.np
            if mask is not self._mask:
                self._mask = mask
                self._mask_view = memoryview(mask)
            flags = self._mask_view[:rows].tobytes()
        masked = flags.count(1) if flags else 0
        mask_hash = hash_ids(batch.req_ids, flags) if masked and flags else 0
        self._publish_decision(entered, rows, flags, masked, mask_hash, 0 if skip else 1)

    def _row_index(self) -> dict[str, int]:
        index: dict[str, int] = self._runner.input_batch.req_id_to_index
        return index
