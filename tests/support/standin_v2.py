"""
A stand-in for vLLM's V2 model runner and its pipeline handler, for unit tests of what is put around them.

Classes, methods, parameters and the order of calls are those of the real ones: `StandInRunner` with a `PPHandler`
(vLLM 0.30 to 0.32) or a `PlainPPHandler` (0.23 to 0.29), and `ModuleRunner` with the two functions that came before
(0.17 to 0.22). Nothing is computed and nothing is sent: `posted` of a runner holds the shape of each collective.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from standin import identity

from rankscope_exporter.contract import RankIdentity

ROWS = 64
CONTEXT = 1 << 20

touched: list[str] = []
"""
What was read of device tensors beside their shape, or waited for; a test looks here, as errors of hooks are swallowed.
"""


def _forbid(name: str) -> Callable[..., Any]:
    def method(*_: Any) -> Any:
        touched.append(name)
        msg = f"{name} of a device tensor or event was used on the host"
        raise AssertionError(msg)

    return method


class Tensor:
    """
    A device tensor: to read more of it than its shape would wait for the device, so that is noted and raises.
    """

    __slots__ = ("shape",)

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name in {"shape", "__class__"} else _forbid(name)()

    __bool__ = __len__ = __iter__ = __array__ = __int__ = __index__ = _forbid("value")
    __getitem__ = __eq__ = __lt__ = __add__ = _forbid("value")
    __hash__ = None  # type: ignore[assignment]


class Event:
    """
    A device event: it may be asked, and not waited for.
    """

    def __init__(self) -> None:
        self.ready = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.ready

    synchronize = wait = _forbid("wait")


def contiguous(tensor: Tensor) -> Tensor:
    return tensor


def pad(tensor: Tensor, columns: int) -> Tensor:
    return Tensor(tensor.shape[0], tensor.shape[1] + columns)


def empty(*shape: int) -> Tensor:
    return Tensor(*shape)


class Group:
    """
    The pipeline group as one rank sees it.
    """

    def __init__(self, *, last: bool, size: int = 2) -> None:
        self.is_last_rank = last
        self.world_size = size
        self.posted: list[tuple[int, ...]] = []
        self.make_event: Callable[[], Any] = Event

    def broadcast(self, tensor: Tensor) -> None:
        self.posted.append(tensor.shape)


@dataclass
class PendingRecv:
    event: Any
    sampled_tokens: Tensor
    num_sampled: Tensor
    num_rejected: Tensor
    idx_mapping: Tensor
    idx_mapping_np: Any
    need_sampled_mask: Any
    gen_at_receive_np: Any
    draft_tokens: Tensor | None = None


def compute_need_sampled_mask(input_batch: Any) -> Any:
    old_computed = input_batch.num_computed_tokens_np
    prefill_len = input_batch.prefill_len_np
    need_sampled_mask = old_computed + input_batch.num_scheduled_tokens >= prefill_len
    finished_prefill = prefill_len + 1 >= input_batch.max_seq_len_np
    finished_prefill &= input_batch.is_prefilling_np
    need_sampled_mask &= ~finished_prefill
    return need_sampled_mask if need_sampled_mask.any() else None


class PlainPPHandler:
    """
    As it was in vLLM 0.23 to 0.29: the sender's tensor goes out as wide as it is, and drafts are not sent.
    """

    def __init__(self, max_num_reqs: int, num_speculative_steps: int, group: Group) -> None:
        self.is_last_rank = group.is_last_rank
        self.max_sample_len = num_speculative_steps + 1
        self.num_speculative_steps = num_speculative_steps
        self.queue: deque[PendingRecv | None] = deque() if self.is_last_rank else deque([None] * group.world_size)
        self.req_idx_gen_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.broadcast_group = group
        self.freed_rows = 0

    def on_req_idx_freed(self, req_idx: int) -> None:
        self.req_idx_gen_np[req_idx] += 1

    def get_prev_sampled_outputs(self, draft_tokens_to_update: Any = None) -> dict[str, Any] | None:
        if not self.queue:
            return None
        slot = self.queue.popleft()
        self.queue.append(None)
        if slot is None:
            return None
        freed = self.req_idx_gen_np[slot.idx_mapping_np] != slot.gen_at_receive_np
        self.freed_rows += int(freed.sum())
        if (freed | ~slot.need_sampled_mask).all():
            return None
        slot.event.ready = True  # the device's stream waits for it here
        return {"sampled_tokens": slot.sampled_tokens, "num_sampled": slot.num_sampled}

    def receive(self, input_batch: Any) -> bool:
        assert not self.is_last_rank
        need_sampled_mask = compute_need_sampled_mask(input_batch)
        if need_sampled_mask is None:
            return False
        num_reqs = input_batch.num_reqs
        group = self.broadcast_group
        sampled_tokens = empty(num_reqs, self.max_sample_len)
        group.broadcast(sampled_tokens)
        group.broadcast(empty(2, num_reqs))
        return self._keep(input_batch, need_sampled_mask, sampled_tokens, self._receive_drafts(num_reqs))

    def _keep(self, input_batch: Any, need_sampled_mask: Any, sampled_tokens: Tensor, draft_tokens: Any) -> bool:
        num_reqs = input_batch.num_reqs
        self.queue[-1] = PendingRecv(
            self.broadcast_group.make_event(), sampled_tokens, Tensor(num_reqs), Tensor(num_reqs), input_batch.idx_mapping,
            input_batch.idx_mapping_np, need_sampled_mask, self.req_idx_gen_np[input_batch.idx_mapping_np], draft_tokens,
        )  # fmt: skip
        return bool(need_sampled_mask.all())

    def _receive_drafts(self, num_reqs: int) -> Tensor | None:
        return None

    def broadcast(self, sampled_token_ids: Any, num_sampled: Any, num_rejected: Any, input_batch: Any) -> None:
        assert self.is_last_rank
        if compute_need_sampled_mask(input_batch) is None:
            return
        self.broadcast_group.broadcast(contiguous(sampled_token_ids))
        self.broadcast_group.broadcast(empty(2, input_batch.num_reqs))


class PPHandler(PlainPPHandler):
    """
    As in vLLM 0.30 to 0.32: the sender pads to the full width, and drafts follow.
    """

    def _receive_drafts(self, num_reqs: int) -> Tensor | None:
        if self.num_speculative_steps == 0:
            return None
        draft_tokens = empty(num_reqs, self.num_speculative_steps)
        self.broadcast_group.broadcast(draft_tokens)
        return draft_tokens

    def broadcast(self, sampled_token_ids: Any, num_sampled: Any, num_rejected: Any, input_batch: Any) -> None:
        assert self.is_last_rank
        if compute_need_sampled_mask(input_batch) is None:
            return
        send_tokens = pad(sampled_token_ids, self.max_sample_len - sampled_token_ids.shape[-1])
        self.broadcast_group.broadcast(contiguous(send_tokens))
        self.broadcast_group.broadcast(empty(2, input_batch.num_reqs))

    def broadcast_drafts(self, draft_tokens: Any, input_batch: Any) -> None:
        assert self.is_last_rank
        if compute_need_sampled_mask(input_batch) is None:
            return
        self.broadcast_group.broadcast(empty(input_batch.num_reqs, self.num_speculative_steps))


class AgreedPPHandler(PPHandler):
    """
    As in vLLM 0.33: both sides compute the width for the step, and drafts follow in the steps in which some were proposed.
    """

    def _sample_len(self, input_batch: Any) -> int:
        return self.max_sample_len if input_batch.num_draft_tokens > 0 else 1

    def receive(self, input_batch: Any, recv_drafts: bool) -> bool:
        assert not self.is_last_rank
        need_sampled_mask = compute_need_sampled_mask(input_batch)
        if need_sampled_mask is None:
            return False
        num_reqs = input_batch.num_reqs
        sampled_tokens = empty(num_reqs, self._sample_len(input_batch))
        self.broadcast_group.broadcast(sampled_tokens)
        self.broadcast_group.broadcast(empty(2, num_reqs))
        drafts = self._receive_drafts(num_reqs) if recv_drafts else None
        return self._keep(input_batch, need_sampled_mask, sampled_tokens, drafts)

    def broadcast(self, sampled_token_ids: Any, num_sampled: Any, num_rejected: Any, input_batch: Any) -> None:
        assert self.is_last_rank
        if compute_need_sampled_mask(input_batch) is None:
            return
        assert sampled_token_ids.shape[-1] == self._sample_len(input_batch)
        self.broadcast_group.broadcast(contiguous(sampled_token_ids))
        self.broadcast_group.broadcast(empty(2, input_batch.num_reqs))


class RequestState:
    """
    Rows of requests: lengths on the host as arrays, on the device as tensors that nobody may read.
    """

    def __init__(self, rows: int = ROWS) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.free_indices = list(range(rows))
        self.prompt_len = SimpleNamespace(np=np.zeros(rows, dtype=np.int32))
        self.prefill_len = SimpleNamespace(np=np.zeros(rows, dtype=np.int32))
        self.max_seq_len = np.zeros(rows, dtype=np.int32)
        self.num_computed_tokens_np = np.zeros(rows, dtype=np.int32)
        self.total_len = SimpleNamespace(gpu=Tensor(rows))
        self.num_computed_tokens = SimpleNamespace(gpu=Tensor(rows))
        self.draft_tokens = Tensor(rows, 0)

    def add_request(self, new: Any) -> None:
        row = self.req_id_to_index[new.req_id] = self.free_indices.pop()
        self.prompt_len.np[row] = self.prefill_len.np[row] = new.prompt
        self.max_seq_len[row] = new.prompt + new.max_tokens
        self.num_computed_tokens_np[row] = new.num_computed_tokens


class StandInRunner:
    """
    One rank of `size`; `drafts` tokens are drafted per request, and `handler` is the class of its pipeline handler.
    """

    def __init__(
        self, *, last: bool = False, drafts: int = 0, size: int = 2, handler: type[PlainPPHandler] = PPHandler,
        rows: int = ROWS,
    ) -> None:  # fmt: skip
        self.is_last_pp_rank = last
        self.num_speculative_steps = drafts
        self.proposes = drafts > 0
        self.group = Group(last=last, size=size)
        self.req_states = RequestState(rows)
        self.pp_handler = handler(rows, drafts, self.group) if size > 1 else None
        self.execute_model_state: Any = None
        self.log: list[str] = []

    @property
    def posted(self) -> list[tuple[int, ...]]:
        return self.group.posted

    def update_pp_decode_requests(self) -> None:
        if self.pp_handler is not None:
            self.pp_handler.get_prev_sampled_outputs(self.req_states.draft_tokens)

    def finish_requests(self, scheduler_output: Any) -> None:
        for req_id in sorted(scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids):
            row = self.req_states.req_id_to_index.pop(req_id, None)
            if row is None:
                continue
            self.req_states.free_indices.append(row)
            if self.pp_handler is not None:
                self.pp_handler.on_req_idx_freed(row)

    def add_requests(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self.req_states.add_request(new)

    def update_requests(self, scheduler_output: Any) -> None:
        self.log.append("update_requests")
        reqs = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed_tokens in zip(reqs.req_ids, reqs.num_computed_tokens, strict=True):
            self.req_states.num_computed_tokens_np[self.req_states.req_id_to_index[req_id]] = num_computed_tokens

    def prepare_inputs(self, scheduler_output: Any) -> Any:
        state = self.req_states
        req_ids = list(scheduler_output.num_scheduled_tokens)
        rows = np.array([state.req_id_to_index[r] for r in req_ids], dtype=np.int32)
        computed = state.num_computed_tokens_np[rows]
        return SimpleNamespace(
            num_reqs=len(req_ids),
            req_ids=req_ids,
            idx_mapping=Tensor(len(req_ids)),
            idx_mapping_np=rows,
            num_computed_tokens_np=computed,
            num_scheduled_tokens=np.array(list(scheduler_output.num_scheduled_tokens.values()), dtype=np.int32),
            prefill_len_np=state.prefill_len.np[rows],
            is_prefilling_np=computed < state.prefill_len.np[rows],
            max_seq_len_np=state.max_seq_len[rows],
            num_draft_tokens=sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values())),
        )

    def forward(self) -> None:
        """The model."""

    def execute_model(
        self,
        scheduler_output: Any,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
    ) -> Any:
        self.log.append("dummy" if dummy_run else "execute_model")
        if not dummy_run:
            self.update_pp_decode_requests()
            self.finish_requests(scheduler_output)
            self.add_requests(scheduler_output)
            self.update_requests(scheduler_output)
            if scheduler_output.total_num_scheduled_tokens == 0:
                return "empty"
        self.forward()
        self.execute_model_state = None if dummy_run else self.prepare_inputs(scheduler_output)
        return None if self.is_last_pp_rank else SimpleNamespace(tensors={})

    def sample(self, input_batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The sampler: as wide as there are drafts in the step."""
        rows = input_batch.num_reqs
        return Tensor(rows, self.num_speculative_steps + 1), Tensor(rows), Tensor(rows)

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.log.append("sample_tokens")
        if self.execute_model_state is None:
            return None
        input_batch, self.execute_model_state = self.execute_model_state, None
        if not self.is_last_pp_rank:
            if isinstance(self.pp_handler, AgreedPPHandler):
                self.pp_handler.receive(input_batch, recv_drafts=self.proposes)
            else:
                self.pp_handler.receive(input_batch)
            return "received"
        sampled, num_sampled, num_rejected = self.sample(input_batch)
        if self.pp_handler is not None:
            self.pp_handler.broadcast(sampled, num_sampled, num_rejected, input_batch)
            if self.proposes and hasattr(self.pp_handler, "broadcast_drafts"):
                self.pp_handler.broadcast_drafts(self.req_states.draft_tokens, input_batch)
        return "sampled"

    def pool(self) -> None:
        """Instead of `sample_tokens`, for models that pool."""
        self.log.append("pool")
        self.execute_model_state = None


group_of_module = Group(last=False)
"""
Where `pp_receive` and `pp_broadcast` post: vLLM asks a global for it.
"""


def pp_broadcast(sampled_token_ids: Any, num_sampled: Any, num_rejected: Any) -> None:
    group_of_module.broadcast(contiguous(sampled_token_ids))
    group_of_module.broadcast(empty(2, sampled_token_ids.shape[0]))


def pp_receive(num_reqs: int, max_sample_len: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    sampled_tokens = empty(num_reqs, max_sample_len)
    group_of_module.broadcast(sampled_tokens)
    group_of_module.broadcast(empty(2, num_reqs))
    return sampled_tokens, Tensor(num_reqs), Tensor(num_reqs)


class ModuleRunner(StandInRunner):
    """
    As in vLLM 0.17 to 0.22: no handler and no guard; what is sampled is always exchanged.
    """

    def __init__(self, *, last: bool = False, drafts: int = 0) -> None:
        super().__init__(last=last, drafts=drafts, size=1)
        del self.pp_handler

    def update_pp_decode_requests(self) -> None: ...

    def finish_requests(self, scheduler_output: Any) -> None:
        for req_id in sorted(scheduler_output.finished_req_ids):
            self.req_states.free_indices.append(self.req_states.req_id_to_index.pop(req_id))

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.log.append("sample_tokens")
        input_batch, self.execute_model_state = self.execute_model_state, None
        if not self.is_last_pp_rank:
            pp_receive(input_batch.num_reqs, max_sample_len=self.num_speculative_steps + 1)
            return None
        pp_broadcast(*self.sample(input_batch))
        return "sampled"

    def pool(self) -> None:
        """Instead of `sample_tokens`, for models that pool."""
        self.execute_model_state = None


@dataclass
class Scheduler:
    """
    One scheduler for all ranks: it counts every draft as accepted, as vLLM's does until it knows better.

    Requests are (prompt, max_tokens); a request that decodes is scheduled again `size` steps later.
    """

    drafts: int = 0
    size: int = 2
    chunk: int = 16
    """Most tokens of a prompt in a step."""
    step: int = 0
    requests: dict[str, Any] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def add(self, name: str, prompt: int = 4, max_tokens: int = 1000) -> None:
        """A request comes in."""
        self.requests[name] = SimpleNamespace(
            req_id=name,
            prompt=prompt,
            max_tokens=max_tokens,
            num_computed_tokens=0,
            outputs=0,
            next_step=0,
            known=False,
        )

    def abort(self, name: str) -> None:
        """A request is given up, wherever it stands."""
        if self.requests.pop(name).known:
            self.finished.add(name)

    def schedule(self, names: Iterable[str] | None = None) -> Any:
        """The next step, for `names` as far as they can be scheduled; for all by default."""
        self.step += 1
        ready = [
            r for r in self.requests.values() if r.next_step <= self.step and (names is None or r.req_id in set(names))
        ]
        new = [r for r in ready if not r.known]
        cached = [r for r in ready if r.known]
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(**vars(r)) for r in new],
            finished_req_ids=self.finished,
            preempted_req_ids=set(),
            scheduled_spec_decode_tokens={},
            num_scheduled_tokens={},
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.req_id for r in cached],
                resumed_req_ids=set(),
                all_token_ids={},
                num_output_tokens=[r.outputs for r in cached],
                num_computed_tokens=[r.num_computed_tokens for r in cached],
            ),
        )
        self.finished = set()
        for request in ready:
            request.known = True
            left = request.prompt - request.num_computed_tokens
            if left > 0:
                tokens = min(left, self.chunk)
            else:
                tokens = 1 + self.drafts
                if self.drafts:
                    output.scheduled_spec_decode_tokens[request.req_id] = [7] * self.drafts
            output.num_scheduled_tokens[request.req_id] = tokens
            request.num_computed_tokens += tokens
            if tokens >= left:
                request.outputs += 1 if left > 0 else tokens
                request.next_step = self.step + self.size
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        for request in ready:
            if request.outputs >= request.max_tokens:
                self.finished.add(request.req_id)
                del self.requests[request.req_id]
        return output


def take_step(runner: StandInRunner, scheduler_output: Any) -> None:
    """
    What a vLLM worker does with one scheduler output.
    """
    runner.execute_model(scheduler_output)
    if scheduler_output.total_num_scheduled_tokens:
        runner.sample_tokens(None)


def identity_of(runner: StandInRunner, **changes: Any) -> RankIdentity:
    """
    The identity of the rank that `runner` is.
    """
    rank = {"pp_rank": 1 if runner.is_last_pp_rank else 0, "runner": "V2", "vllm_version": "0.32.0", "spec_tokens": 0}
    return identity(**{**rank, **changes})
