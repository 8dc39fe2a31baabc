"""
A model runner with the request state, the mask, the guards and the fault of vLLM's, and no model.

Only what decides lengths is here. Every step all drafts count as accepted, on every rank; what was rejected is taken
off again on the last rank only, because the trim is an `elif` of the question whether this is another one. The mask
of requests whose token is discarded, and with it the guard of the collective, follows from those lengths.

The trim fix of Rankscope changes `_update_states` here as it does in vLLM: keep the shape that it looks for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rankscope_exporter.simulation.scheduler import SchedulerOutput

Tokens = npt.NDArray[np.int32]


class Group(Protocol):
    """
    The pipeline group of one rank. Collectives return when all ranks have taken part, so perhaps never.
    """

    @property
    def is_last_rank(self) -> bool:
        """
        Whether this rank samples.
        """

    def broadcast(self, tokens: Tokens) -> None:
        """
        Give the sampled tokens to all other ranks.
        """

    def receive(self, shape: tuple[int, int]) -> Tokens:
        """
        Take the sampled tokens from the last rank.
        """


@dataclass(slots=True)
class RequestState:
    """
    What a rank caches about a request.
    """

    prompt_tokens: int
    random: np.random.Generator
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    prev_num_draft_len: int = 0

    @property
    def num_tokens(self) -> int:
        """
        Prompt and output, as this rank believes.
        """
        return self.prompt_tokens + len(self.output_token_ids)


class InputBatch:
    """
    The requests of the running step, a row each.
    """

    def __init__(self) -> None:
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}
        self.prev_req_id_to_index: dict[str, int] = {}
        self.prev_sampled_token_ids: Tokens | None = None

    @property
    def num_reqs(self) -> int:
        """
        Rows in use.
        """
        return len(self.req_ids)

    def set_rows(self, request_ids: list[str]) -> None:
        """
        Give each request its row.
        """
        self.req_ids = request_ids
        self.req_id_to_index = {request_id: row for row, request_id in enumerate(request_ids)}


@dataclass(frozen=True, slots=True)
class MaskBuffer:
    """
    A flag for each row, on the host; vLLM has a copy on the device beside it.
    """

    np: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """
    What a rank hands to the next one; empty, for nothing is computed.
    """

    tensors: Mapping[str, Tokens] = field(default_factory=dict)


EMPTY: Mapping[str, int] = {}
"""
Result of a step in which nothing was scheduled.
"""


class ModelRunner:
    """
    The runner of one rank. `forward` takes the time that a model would.
    """

    def __init__(
        self, group: Group, *, slots: int, draft_tokens: int, accept: float, forward: Callable[[], None] = lambda: None
    ) -> None:
        self.group = group
        self.accept = accept
        self.num_spec_tokens = draft_tokens
        self.requests: dict[str, RequestState] = {}
        self.input_batch = InputBatch()
        self.discard_request_mask = MaskBuffer(np.zeros(slots, np.bool_))
        self._forward = forward
        self._pending: SchedulerOutput | None = None

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> Mapping[str, int] | IntermediateTensors | None:
        """
        Run the model: None on the last rank, which samples next; tensors for the next rank on the others.
        """
        del intermediate_tensors
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY
        self._mask_requests(scheduler_output)
        self._forward()
        self._pending = scheduler_output
        return None if self.group.is_last_rank else IntermediateTensors()

    def sample_tokens(self, grammar_output: None = None) -> Mapping[str, int]:
        """
        Sample and spread, or receive, the step's tokens: how many each request got, on the last rank.
        """
        del grammar_output
        plan, self._pending = self._pending, None
        if plan is None:
            return EMPTY
        if not self.group.is_last_rank:
            self._pp_receive_prev_sampled_token_ids_to_input_batch()
            return EMPTY
        tokens = self._sample(plan)
        self._pp_broadcast_prev_sampled_token_ids(tokens)
        self.input_batch.prev_sampled_token_ids = tokens
        self._advance()
        counts = (tokens >= 0).sum(axis=1).tolist()
        return dict(zip(self.input_batch.req_ids, counts, strict=True))

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.req_id] = RequestState(new.prompt_tokens, np.random.default_rng(new.seed))

        is_last_rank = self.group.is_last_rank
        req_data = scheduler_output.scheduled_cached_reqs
        scheduled_spec_tokens = scheduler_output.scheduled_spec_decode_tokens
        for i, req_id in enumerate(req_data.req_ids):
            req_state = self.requests[req_id]
            num_output_tokens = req_data.num_output_tokens[i]
            if req_state.prev_num_draft_len:
                optimistic = req_state.prev_num_draft_len
                req_state.output_token_ids.extend([-1] * optimistic)
            req_state.num_computed_tokens = req_data.num_computed_tokens[i]
            if not is_last_rank:
                pass  # with asynchronous scheduling the tokens come by broadcast, not with the plan
            elif num_output_tokens < len(req_state.output_token_ids):
                del req_state.output_token_ids[num_output_tokens:]
            req_state.prev_num_draft_len = len(scheduled_spec_tokens.get(req_id, ()))
        self.input_batch.set_rows([*req_data.req_ids, *(new.req_id for new in scheduler_output.scheduled_new_reqs)])

    def _mask_requests(self, plan: SchedulerOutput) -> None:
        for row, request_id in enumerate(self.input_batch.req_ids):
            state = self.requests[request_id]
            length = state.num_computed_tokens + plan.num_scheduled_tokens[request_id]
            self.discard_request_mask.np[row] = length < state.num_tokens

    def _is_all_reqs_chunked_prefill(self) -> bool:
        return bool(self.discard_request_mask.np[: self.input_batch.num_reqs].all())

    def _pp_broadcast_prev_sampled_token_ids(self, sampled_token_ids: Tokens) -> None:
        if not self._is_all_reqs_chunked_prefill():
            self.group.broadcast(sampled_token_ids)

    def _pp_receive_prev_sampled_token_ids_to_input_batch(self) -> None:
        shape = (self.input_batch.num_reqs, 1 + self.num_spec_tokens)
        received: Tokens = np.full(shape, -1, np.int32)
        if not self._is_all_reqs_chunked_prefill():
            received = self.group.receive(shape)
        self.input_batch.prev_sampled_token_ids = received
        self._advance()

    def _advance(self) -> None:
        """
        Count the sampled token of every request that is not masked; its drafts come in the next step.
        """
        unmasked = {
            request_id: row
            for row, request_id in enumerate(self.input_batch.req_ids)
            if not self.discard_request_mask.np[row]
        }
        for request_id in unmasked:
            self.requests[request_id].output_token_ids.append(-1)
        self.input_batch.prev_req_id_to_index = unmasked

    def _sample(self, plan: SchedulerOutput) -> Tokens:
        tokens: Tokens = np.full((self.input_batch.num_reqs, 1 + self.num_spec_tokens), -1, np.int32)
        for row, request_id in enumerate(self.input_batch.req_ids):
            if self.discard_request_mask.np[row]:
                continue
            drafts = len(plan.scheduled_spec_decode_tokens.get(request_id, ()))
            good = self.requests[request_id].random.random(drafts) < self.accept
            tokens[row, : 1 + int(np.logical_and.accumulate(good).sum())] = 1
        return tokens
