"""
Recording the V2 model runner.

Its request state lives on the device. On the host it keeps copies of the scheduler's lengths; the last rank sends what
it sampled in two messages, and its drafts in a third, and the other ranks keep what they received in a queue, to be
used when the same requests come again, pp_size steps later. Whether a batch has anything to send is computed from the
scheduler's output alone, by a function that every rank calls: its answer is the guard.

A slot of the queue holds tensors that may not be filled yet. None of them is read; only the host's own row numbers and
generations are, and its event is asked, which does not wait.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from rankscope_exporter.contract.words import Lengths, Phase, Role
from rankscope_exporter.control import Control
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_exporter.recorder.base import BROADCAST, SAMPLE_STEPS, Drifting, Recorder, hash_ids
from rankscope_exporter.recorder.device import Sample
from rankscope_exporter.recorder.options import RecorderOptions

OUTSTANDING = 64
"""
Most receives whose end is awaited; a queue has one slot for each pipeline rank.
"""
SAMPLED_MESSAGES = 2
"""
Sampled tokens, and how many were sampled and rejected.
"""

_STATE, _EQUAL = layout.PART_STATE.pack_into, layout.PART_STATE_EQUAL.pack_into
_STATE_OFFSET, _PHASE = layout.PART_STATE_OFFSET, layout.PHASE_OFFSET
_UPDATED, _COMPUTED = int(Phase.STATE_UPDATED), int(Lengths.COMPUTED_TOKENS)
_RECEIVER = int(Role.RECEIVER)
_INVERT = bytes.maketrans(b"\0\1", b"\1\0")
_now = time.monotonic_ns


class V2Recorder(Recorder):
    """
    `handler` is the runner's pipeline handler, None where the release has none or the engine one rank only.

    `drafts` says whether drafts follow the sampled tokens on the same way, unless a receive says otherwise;
    `sample_device` samples device-side lengths and raises nothing, None if that is off.
    """

    HOOKS = ("execute_model", "update_requests", "compute_need_sampled_mask")

    __slots__ = (
        "_array", "_batch_ids", "_computed", "_drafts", "_drafts_follow", "_dropped", "_freed_step", "_handler",
        "_outstanding", "_sample_device",
    )  # fmt: skip

    def __init__(
        self, runner: Any, flight: FlightWriter, control: Control, options: RecorderOptions, *,
        handler: Any, drafts: bool, sample_device: Sample | None,
    ) -> None:  # fmt: skip
        super().__init__(runner, flight, control, options)
        self._handler = handler
        self._drafts = self._drafts_follow = drafts
        self._sample_device = sample_device
        self._dropped = 0
        self._freed_step = 0
        """Last step in which the scheduler took requests out of the batch, or put new ones into their rows."""
        self._array: Any = None
        self._computed: Any = None
        """The array of lengths that the runner has, as something of which single elements are quick to read."""
        self._outstanding: deque[tuple[Callable[[], bool], int]] = deque(maxlen=OUTSTANDING)
        self._batch_ids: list[str] = []

    def consume(self) -> None:
        """
        The slot at the head of the receive queue is about to be used: count its rows whose request was freed since.
        """
        outstanding = self._outstanding
        while outstanding and outstanding[0][0]():
            self._completed = outstanding.popleft()[1]
        handler = self._handler
        queue = handler.queue
        # A slot was received as many steps ago as the queue is deep; as a rule no request has left since.
        if queue and self._freed_step >= self._step - len(queue) and (slot := queue[0]) is not None:
            freed = handler.req_idx_gen_np[slot.idx_mapping_np] != slot.gen_at_receive_np
            self._dropped += int(np.count_nonzero(freed))

    def update(self, scheduler_output: Any) -> None:
        """
        The request state was updated: record the host's lengths against the scheduler's, and the receive queue.
        """
        if not self._offset:
            return
        entered = _now() if self._own else 0
        cached = scheduler_output.scheduled_cached_reqs
        if (
            scheduler_output.finished_req_ids
            or scheduler_output.preempted_req_ids
            or scheduler_output.scheduled_new_reqs
        ):
            self._freed_step = self._step
        state = self._runner.req_states
        index = state.req_id_to_index
        if state.num_computed_tokens_np is not self._array:
            self._array = state.num_computed_tokens_np
            self._computed = memoryview(self._array)
        computed = self._computed
        lengths = [computed[index[r]] for r in cached.req_ids]
        wanted = cached.num_computed_tokens
        total = sum(lengths)
        longest = max(lengths) if lengths else 0
        depth = filled = 0
        if self._handler is not None and self._handler.queue:
            queue = self._handler.queue
            depth = len(queue)
            filled = depth - queue.count(None)
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
                0,
                self._dropped,
                longest,
                longest,
                self._state,
                _COMPUTED,
                depth,
                filled,
            )
        else:
            drift = [a - b for a, b in zip(lengths, wanted, strict=True)]
            self._drifting = self._find_drifting(cached.req_ids, lengths, drift)
            _STATE(
                memory, offset + _STATE_OFFSET, total, sum(wanted), sum(drift), 0, self._dropped, longest, max(wanted),
                max(drift), len(self._drifting), self._state, _COMPUTED, depth, filled,
            )  # fmt: skip
        memory[offset + _PHASE] = _UPDATED
        if entered and self._step % SAMPLE_STEPS == 0 and self._detailed:
            self._sample(lengths, wanted)  # the steps that are sampled are among those that are measured
        if self._sample_device is not None:
            self._sample_device(self._step, cached, state.prompt_len.np, [index[r] for r in cached.req_ids])
        if entered:
            self._own_update = _now() - entered
            self._own += self._own_update

    def update_blindly(self, scheduler_output: Any) -> None:
        """
        As `update`, where the runner keeps no lengths on the host (before vLLM 0.20): they stay unknown.
        """
        if not self._offset:
            return
        if self._sample_device is not None:
            cached = scheduler_output.scheduled_cached_reqs
            state = self._runner.req_states
            rows = [state.req_id_to_index[r] for r in cached.req_ids]
            self._sample_device(self._step, cached, state.prompt_len.np, rows)
        _STATE(self._memory, self._offset + _STATE_OFFSET, 0, 0, 0, 0, 0, 0, 0, 0, 0, self._state, 0, 0, 0)
        self._memory[self._offset + _PHASE] = _UPDATED

    def _find_drifting(self, ids: list[str], lengths: list[int], drift: list[int]) -> list[Drifting]:
        """
        The requests with drift > 0, worst first. No mask depends on these lengths, so none has a margin.
        """
        first: dict[str, int] = {}
        found = []
        for request_id, length, excess in zip(ids, lengths, drift, strict=True):
            if excess > 0:
                self._first_step(request_id, first)
                found.append((excess, length, length - excess, layout.MARGIN_UNKNOWN, request_id))
        self._first_drift = first
        found.sort(reverse=True)
        return found

    def decide(self, needed: Any, batch: Any) -> None:
        """
        VLLM has computed which rows of `batch` need what is sampled (None: no row does); what follows is the exchange.

        An answer outside the exchange's methods, or a second one in the same step, is not a decision.
        """
        if not self._role or self._guard or not self._offset:
            return
        entered = _now()
        ids = self._batch_ids = batch.req_ids
        rows = batch.num_reqs
        if needed is None:
            self._publish_decision(entered, rows, b"\1" * rows, rows, hash_ids(ids, b"\1" * rows), 0)
            return
        flags = needed.tobytes().translate(_INVERT)
        masked = flags.count(1)
        mask_hash = hash_ids(ids, flags) if masked else 0
        messages = SAMPLED_MESSAGES + (self._drafts_follow and self._role == _RECEIVER)
        self._publish_decision(entered, rows, flags, masked, mask_hash, messages)

    def enter_receive(self, width: int, drafts: bool | None) -> None:
        """
        As `enter`, as a receiver; `drafts` says whether drafts follow in this step, None if they do as in every step.
        """
        self._role = _RECEIVER
        self._width = width
        self._drafts_follow = self._drafts if drafts is None else drafts

    def receive_unguarded(self, rows: int, width: int) -> None:
        """
        A receive of `rows` requests, `width` columns wide, without a guard (vLLM 0.17 to 0.22): no mask is known.
        """
        self._decide_unguarded(int(Role.RECEIVER), rows, width)

    def send_unguarded(self, rows: int, width: int) -> None:
        """
        The sender's side of the same.
        """
        self._decide_unguarded(int(Role.SENDER), rows, width)

    def _decide_unguarded(self, role: int, rows: int, width: int) -> None:
        if self._guard or not self._offset:
            return
        self.enter(role, width)
        self._publish_decision(_now(), rows, None, 0, 0, SAMPLED_MESSAGES)

    def stop_sampling(self) -> None:
        """
        Sample no device-side lengths from now on.
        """
        self._sample_device = None

    def _row_index(self) -> dict[str, int]:
        return {request_id: row for row, request_id in enumerate(self._batch_ids)}

    def send_drafts(self) -> None:
        """
        The last rank sends its drafts, if it sent the sampled tokens.
        """
        self._post_more(1)

    def leave(self, width: int) -> None:
        """
        As `Recorder.leave`; a receive that was only enqueued is complete once its event says so.
        """
        if not self._completes and self._role == _RECEIVER and self._guard == BROADCAST and self._handler is not None:
            slot = self._handler.queue[-1] if self._handler.queue else None
            query = getattr(slot.event, "query", None) if slot is not None else None
            if query is not None:
                self._outstanding.append((query, self._posted))
        Recorder.leave(self, width)
