"""
Pipeline ranks without a model: vLLM's real scheduler drives real `_update_states` and real `InputBatch`, many ranks at once.

One `Engine` holds an `AsyncScheduler` (prefix cache, chunked prefill, so few KV blocks that requests get preempted) and
feeds what it schedules to any number of ranks. A rank is a `GPUModelRunner` made without its constructor, plus the version
of `_update_states` that it shall run, so that stock code, edited source and swapped code see the same steps side by side.

What is vLLM's own, per step: `AsyncScheduler.schedule` and `update_from_output`, the engine's order of the two (as many
steps in flight as the configuration says, two at PP=2), `_update_states` with the correction that it returns,
`_prepare_inputs` up to and including the discard mask, `sample_tokens` of the non-last rank (guard, receive, append),
`_pp_broadcast_prev_sampled_token_ids` and `_bookkeeping_sync` of the last rank.

What stands in for vLLM's code, and why:

- Constructor of the runner: it loads a platform and a model. Only the attributes that the methods above read are set.
- The rest of `_prepare_inputs`, attention, KV data, the drafter: nothing there writes the state that is compared.
- The verdict on the drafts: random, seeded, with an acceptance rate per request.
- `get_pp_group` and `torch.distributed.broadcast`: all ranks live in one process. A collective that the last rank did not
  post leaves the receiver's tensor alone, where it would hang in reality: so disagreements can be counted past the first.
- The tensor that is sent: the newest token of each request, shape [n, 1]. Stock V1 asserts that width and with drafts
  has k + 1, so deployments that combine the two carry a relay of this kind.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import json
import pickle
import random
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

DRAFTS = 3
BLOCK = 16
BLOCKS = 26
"""
KV blocks, of which one request may need ten: eight of them do not fit.
"""

REQUESTS = 8
CONTEXT = 256
VOCABULARY = 1000

SOURCE = Path(GPUModelRunner._update_states.__code__.co_filename)

Update = Callable[[Any, SchedulerOutput], Callable[[], None] | None]


# --- Versions of `_update_states` -------------------------------------------------------------------------------------


def duplicate(function: types.FunctionType) -> types.FunctionType:
    """
    A second function with the code that `function` has now, so that a later exchange of that code does not reach it.
    """
    return on_module(function.__code__)


def edited_source(directory: Path) -> types.FunctionType:
    """
    `_update_states` out of a copy of the module's source in which a person has made the `elif` an `if`.
    """
    return on_module(compiled(edit("elif num_output_tokens < len(", "if num_output_tokens < len("), directory))


def edit(old: str, new: str) -> str:
    """
    The module's source with one place changed.
    """
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{text.count(old)} places read {old!r}"
    return text.replace(old, new)


def compiled(text: str, directory: Path, name: str = "_update_states") -> types.CodeType:
    """
    The code of method `name` out of `text`, which is written to and compiled as a file in `directory`.
    """
    path = directory / "gpu_model_runner_copy.py"
    path.write_text(text, encoding="utf-8")
    pending = [compile(text, str(path), "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        if code.co_name == name:
            return code
        pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    msg = f"no {name} in the source"
    raise LookupError(msg)


def on_module(code: types.CodeType) -> types.FunctionType:
    """
    A function that runs `code` on the names of the loaded model runner module.
    """
    closure = tuple(types.CellType(GPUModelRunner) for _ in code.co_freevars)
    return types.FunctionType(code, vars(gpu_model_runner), code.co_name, None, closure)


@functools.cache
def prepare_until_mask() -> types.FunctionType:
    """
    The module's own `_prepare_inputs`, cut off behind the statement that sets the discard mask.
    """
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    [definition] = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_prepare_inputs")
    end = definition.body.index(mask_statement(definition))
    definition.body = definition.body[: end + 1]
    definition.decorator_list = []
    tree.body = [definition]
    scratch: dict[str, Any] = {}
    exec(compile(tree, str(SOURCE), "exec", dont_inherit=True), vars(gpu_model_runner), scratch)
    return scratch["_prepare_inputs"]


def mask_statement(definition: ast.FunctionDef) -> ast.stmt:
    """
    The one top level statement of `definition` that assigns to the discard mask.
    """
    [statement] = (
        s
        for s in definition.body
        if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]).startswith("self.discard_request_mask.np[")
    )
    return statement


# --- One rank ---------------------------------------------------------------------------------------------------------


class Group:
    """
    A pipeline group of two as one rank sees it, and the one broadcast of a step that its members share.
    """

    world_size = 2
    last_rank = 1

    def __init__(self, *, last: bool) -> None:
        self.is_last_rank, self.is_first_rank, self.rank = last, not last, int(last)
        self.device_group = self
        self.posted = False
        self.sent: torch.Tensor | None = None

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any) -> None:
        """
        Stands in for `torch.distributed.broadcast`.
        """
        assert (src, group) == (self.last_rank, self)
        self.posted = True
        if self.is_last_rank:
            self.sent = tensor
        elif self.sent is not None:
            tensor.copy_(self.sent)


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """
    What one rank made of one step.

    `prepared` is its state when the mask has been set, `finished` its state after the sampled tokens were received; both
    by the name of what is compared, arrays whole, as bytes.
    """

    drift: dict[str, int]
    masked: dict[str, bool]
    posted: bool
    prepared: dict[str, Any]
    finished: dict[str, Any]

    def differs_in(self, other: "View") -> set[str]:
        """
        The names of everything in which two ranks differ.
        """
        names = {name for name in self.prepared if self.prepared[name] != other.prepared[name]}
        names |= {name for name in self.finished if self.finished[name] != other.finished[name]}
        names |= {name for name in ("drift", "masked", "posted") if getattr(self, name) != getattr(other, name)}
        return names


class Rank:
    """
    A fake runner around vLLM's real methods. `update` is its version of `_update_states`.
    """

    def __init__(self, config: VllmConfig, update: Update, *, last: bool) -> None:
        self.update = update
        self.group = Group(last=last)
        self.runner = _make_runner(config)
        self._prepared: tuple[dict[str, int], dict[str, bool], dict[str, Any]] | None = None

    def execute(self, output: SchedulerOutput) -> None:
        """
        Do what `execute_model` does to the host's state, in its order.
        """
        runner = self.runner
        with self._current():
            correct = self.update(runner, output)
            cached = output.scheduled_cached_reqs
            drift = {
                req_id: len(runner.requests[req_id].output_token_ids) - length
                for req_id, length in zip(cached.req_ids, cached.num_output_tokens, strict=True)
            }
            if not output.total_num_scheduled_tokens:
                self._prepared = (drift, {}, self._state())
                return
            tokens = [output.num_scheduled_tokens[req_id] for req_id in runner.input_batch.req_ids]
            prepare_until_mask()(runner, output, np.array(tokens, dtype=np.int32))
            self._prepared = (drift, self.masked(), self._state())
            if self.group.is_last_rank and correct is not None:  # the others have handed their tensors on and returned
                correct()

    def masked(self) -> dict[str, bool]:
        """
        By request of the batch: whether its sampled token is to be discarded.
        """
        batch = self.runner.input_batch
        mask = self.runner.discard_request_mask.np[: batch.num_reqs]
        return dict(zip(batch.req_ids, mask.tolist(), strict=True))

    def sample(self, output: SchedulerOutput, sampled: torch.Tensor) -> None:
        """
        Do what `sample_tokens` does on the last rank: `sampled` has a row per request, [n, k + 1], -1 where rejected.
        """
        runner = self.runner
        with self._current():
            newest = (sampled >= 0).sum(dim=1)
            tokens = sampled.gather(1, (newest - 1).clamp(min=0).unsqueeze(1))
            self.group.posted, self.group.sent = False, None
            runner._pp_broadcast_prev_sampled_token_ids(tokens)
            runner.valid_sampled_token_count_cpu = (
                newest  # as _copy_valid_sampled_token_count leaves it, less the stream
            )
            runner.input_batch.prev_sampled_token_ids = tokens
            runner._bookkeeping_sync(output, SamplerOutput(sampled, None), None, torch.empty(0), 0)

    def receive(self, sent: torch.Tensor | None) -> None:
        """
        Run `sample_tokens` of a rank that is not the last; `sent` is what the last rank has posted, if it has.
        """
        with self._current():
            self.group.posted, self.group.sent = False, sent
            self.runner.sample_tokens(None)

    def view(self) -> View:
        """
        The step that has just ended, as this rank saw it.
        """
        assert self._prepared is not None
        drift, masked, prepared = self._prepared
        return View(drift, masked, self.group.posted, prepared, self._state())

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """
        While this lasts, vLLM's code finds itself on this rank.
        """
        real = gpu_model_runner.get_pp_group, torch.distributed.broadcast
        gpu_model_runner.get_pp_group, torch.distributed.broadcast = lambda: self.group, self.group.broadcast
        try:
            with torch.inference_mode():
                yield
        finally:
            gpu_model_runner.get_pp_group, torch.distributed.broadcast = real

    def _state(self) -> dict[str, Any]:
        runner, batch = self.runner, self.runner.input_batch
        table = batch.block_table[0]
        arrays = {
            "token_ids_cpu": batch.token_ids_cpu,
            "is_token_ids": batch.is_token_ids,
            "num_tokens_no_spec": batch.num_tokens_no_spec,
            "num_prompt_tokens": batch.num_prompt_tokens,
            "num_computed_tokens_cpu": batch.num_computed_tokens_cpu,
            "block_table": table.block_table.np,
            "num_blocks_per_row": table.num_blocks_per_row,
            "discard_request_mask": runner.discard_request_mask.np,
            "optimistic_seq_lens": runner.optimistic_seq_lens_cpu.numpy(),
            "prev_num_draft_tokens": runner.prev_num_draft_tokens.np,
            "prev_positions": runner.prev_positions.np,
            "input_ids": runner.input_ids.cpu.numpy(),
        }
        requests = runner.requests.items()
        return {name: array.tobytes() for name, array in arrays.items()} | {
            "req_ids": list(batch.req_ids),
            "req_id_to_index": dict(batch.req_id_to_index),
            "prev_req_id_to_index": dict(batch.prev_req_id_to_index or {}),
            "spec_token_ids": [list(tokens) for tokens in batch.spec_token_ids],
            "output_token_ids": {req_id: list(state.output_token_ids) for req_id, state in requests},
            "request_num_computed_tokens": {req_id: state.num_computed_tokens for req_id, state in requests},
            "prev_num_draft_len": {req_id: state.prev_num_draft_len for req_id, state in requests},
            "block_ids": {req_id: [list(ids) for ids in state.block_ids] for req_id, state in requests},
        }


def _make_runner(config: VllmConfig) -> Any:
    runner: Any = GPUModelRunner.__new__(GPUModelRunner)
    device = torch.device("cpu")
    tokens = config.scheduler_config.max_num_batched_tokens
    runner.device = device
    runner.max_model_len = CONTEXT
    runner.speculative_config = config.speculative_config
    runner.use_async_scheduling = True
    runner.use_async_spec_decode = True
    runner.is_pooling_model = False
    runner.uses_mrope = False
    runner.uses_xdrope_dim = 0
    runner.enable_prompt_embeds = False
    runner.requests = {}
    runner.num_prompt_logprobs = {}
    runner.encoder_cache = {}
    runner.late_interaction_runner = gpu_model_runner.LateInteractionRunner()
    runner.kv_cache_config = _kv_cache()
    runner.reorder_batch_threshold = None
    runner.execute_model_state = None
    runner.kv_connector_output = None
    runner.valid_sampled_token_count_event = types.SimpleNamespace(synchronize=lambda: None)
    runner.arange_np = np.arange(max(REQUESTS + 1, CONTEXT, tokens), dtype=np.int64)
    runner.optimistic_seq_lens_cpu = torch.zeros(REQUESTS, dtype=torch.int32)
    for name, size, dtype in (
        ("discard_request_mask", REQUESTS, torch.bool),
        ("prev_num_draft_tokens", REQUESTS, torch.int32),
        ("prev_positions", REQUESTS, torch.int64),
        ("query_start_loc", REQUESTS + 1, torch.int32),
        ("query_pos", tokens, torch.int64),
        ("input_ids", tokens, torch.int32),
    ):
        setattr(runner, name, runner._make_buffer(size, dtype=dtype))
    runner.input_batch = InputBatch(
        max_num_reqs=REQUESTS,
        max_model_len=CONTEXT,
        max_num_batched_tokens=tokens,
        device=device,
        vocab_size=VOCABULARY,
        block_sizes=[BLOCK],
        kernel_block_sizes=[BLOCK],
        max_num_blocks_per_req=[CONTEXT // BLOCK],
        num_spec_tokens=DRAFTS,
    )
    return runner


# --- The engine -------------------------------------------------------------------------------------------------------


def make_config(directory: Path) -> VllmConfig:
    """
    PP=2, asynchronous scheduling, a draft model with k = 3. The checkpoint in `directory` is a configuration alone.
    """
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(model))
    target = ModelConfig(model=str(directory), skip_tokenizer_init=True, max_model_len=CONTEXT, dtype="float32", seed=0)
    parallel = ParallelConfig(pipeline_parallel_size=2, distributed_executor_backend="mp")
    config = VllmConfig(
        model_config=target,
        parallel_config=parallel,
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(directory),
            num_speculative_tokens=DRAFTS,
            target_model_config=target,
            target_parallel_config=parallel,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=64,
            max_model_len=CONTEXT,
            is_encoder_decoder=False,
            async_scheduling=True,
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    config.scheduler_config.async_scheduling = True  # the CPU platform turns it off; a GPU would not
    assert not config.use_v2_model_runner
    return config


def _kv_cache() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


class Engine:
    """
    A real scheduler under seeded traffic, and the ranks that follow it.

    The first of `last` is the rank that samples, the others of `last` repeat its tokens, those of `first` receive them.
    `arrivals` is the chance of a new request per step, so it says how large batches get.
    """

    def __init__(
        self, config: VllmConfig, seed: int, arrivals: float, last: Sequence[Rank], first: Sequence[Rank]
    ) -> None:
        self.preemptions = 0
        self.forced_preemptions = 0
        self.completed = 0
        self.aborted = 0
        self._random = random.Random(seed)
        self._arrivals = arrivals
        self._last, self._first = last, first
        self._depth = config.max_concurrent_batches
        self._in_flight: collections.deque[tuple[SchedulerOutput, ModelRunnerOutput]] = collections.deque()
        self._acceptance: dict[str, float] = {}
        self._prefixes = [[self._random.randrange(VOCABULARY) for _ in range(CONTEXT)] for _ in range(3)]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._scheduler = AsyncScheduler(
            vllm_config=config,
            kv_cache_config=_kv_cache(),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )

    def steps(self, count: int) -> Iterator[list[View]]:
        """
        Run `count` steps with tokens in them; each yields the views of the ranks, those of `last` first.
        """
        while count:
            self._traffic()
            if not self._scheduler.has_requests():
                continue
            before = self._preempted()
            output = self._scheduler.schedule()
            self.preemptions += self._preempted() - before
            if output.total_num_scheduled_tokens:
                count -= 1
                yield self._run(output)
            else:
                self._execute(output)
                self._in_flight.append((output, ModelRunnerOutput([], {})))
            if len(self._in_flight) >= self._depth or not output.total_num_scheduled_tokens:
                self._update(*self._in_flight.popleft())

    def _run(self, output: SchedulerOutput) -> list[View]:
        self._execute(output)

        leader = self._last[0]
        rows = self._verdicts(output, leader.masked())
        padded = [row + [-1] * (DRAFTS + 1 - len(row)) for row in rows]
        sampled = torch.tensor(padded, dtype=torch.int32)
        for rank in self._last:
            rank.sample(output, sampled)
        for rank in self._first:
            rank.receive(leader.group.sent)

        batch = leader.runner.input_batch
        self._in_flight.append(
            (output, ModelRunnerOutput(list(batch.req_ids), dict(batch.req_id_to_index), sampled_token_ids=rows))
        )
        return [rank.view() for rank in (*self._last, *self._first)]

    def _execute(self, output: SchedulerOutput) -> None:
        wire = pickle.dumps(output)
        for rank in (*self._last, *self._first):
            rank.execute(pickle.loads(wire))  # runners write into the lists that they are given: each gets its own

    def _verdicts(self, output: SchedulerOutput, masked: dict[str, bool]) -> list[list[int]]:
        rows = []
        for req_id, discard in masked.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            accepted = 0
            while accepted < drafts and self._random.random() < self._acceptance[req_id]:
                accepted += 1
            rows.append([] if discard else [self._random.randrange(VOCABULARY) for _ in range(accepted + 1)])
        return rows

    def _update(self, output: SchedulerOutput, sampled: ModelRunnerOutput) -> None:
        before = self._scheduler.requests.keys() | set()
        self._scheduler.update_from_output(output, sampled)
        self.completed += len(before - self._scheduler.requests.keys())

    def _traffic(self) -> None:
        """
        Now and then a new request, a client that goes away, an operator who resets the prefix cache.
        """
        draw, scheduler = self._random, self._scheduler
        if draw.random() < self._arrivals and len(scheduler.requests) < 2 * REQUESTS:
            prompt = draw.choice(self._prefixes)[: draw.randrange(60)]
            prompt = prompt + [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 40))]
            req_id = f"r{len(self._acceptance)}"
            self._acceptance[req_id] = draw.choice((0.0, 0.3, 0.6, 0.9, 1.0))
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=draw.randint(1, 60),
                ignore_eos=True,
                stop_token_ids=draw.choice(([], list(range(15)))),
            )
            scheduler.add_request(Request(req_id, prompt, sampling, None, block_hasher=self._hasher))
        if scheduler.requests and draw.random() < 0.004:
            scheduler.finish_requests(draw.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
            self.aborted += 1
        if scheduler.running and draw.random() < 0.002:
            before = self._preempted()
            scheduler.reset_prefix_cache(reset_running_requests=True)
            self.forced_preemptions += self._preempted() - before

    def _preempted(self) -> int:
        return sum(request.num_preemptions for request in self._scheduler.requests.values())
