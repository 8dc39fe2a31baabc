"""
A V2 model runner on one GPU: vLLM's own pipeline handler, real streams, events and NCCL, around a model that is only work.

The handler is the file `vllm/v1/worker/gpu/pp_utils.py` of a vLLM release, loaded by path: the few modules that it
imports are stood in for, so that neither vLLM nor its build for CUDA is needed. Its group has one rank, so a broadcast
is enqueued on the handler's stream as in a pipeline, and waits for nobody.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

PP_SIZE = 2
SLOTS = 64
DRAFTS = 3


class Group:
    """
    The pipeline group that the handler asks for.
    """

    world_size, last_rank = PP_SIZE, 0

    def __init__(self) -> None:
        self.is_last_rank = False

    def make_sibling_device_group(self, **_: Any) -> Any:
        """
        The group of one rank.
        """
        return torch.distributed.group.WORLD


GROUP = Group()


def load_handler_module(path: Path) -> ModuleType:
    """
    The module of vLLM with `PPHandler`, from its file.
    """
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_XPU_PP_MICROBATCH": True},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_pp_group": lambda: GROUP},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_xpu=lambda: False)},
        "vllm.sequence": {"IntermediateTensors": object},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"async_tensor_h2d": _to_device},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu": {},
        "vllm.v1.worker.gpu.input_batch": {"InputBatch": object},
    }
    for name, content in stand_ins.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(content)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    name = "vllm.v1.worker.gpu.pp_utils"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _to_device(values: np.ndarray, *, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


class Runner:
    """
    Runs `SLOTS` requests, all in decode, as the sender or a receiver of the sampled tokens.

    A step's model is `work` products of matrices of `size` rows and columns.
    """

    def __init__(
        self, handler_module: ModuleType, device: torch.device, *, last_rank: bool, size: int, work: int
    ) -> None:
        GROUP.is_last_rank = last_rank
        self.device = device
        self.last_rank = last_rank
        self.pp_handler = handler_module.PPHandler(SLOTS, DRAFTS, device)
        ids = [f"cmpl-{n:032x}-0" for n in range(SLOTS)]
        self.req_states = SimpleNamespace(
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            num_computed_tokens_np=np.full(SLOTS, 100, np.int32),
            prompt_len=SimpleNamespace(np=np.full(SLOTS, 50, np.int32)),
            total_len=SimpleNamespace(gpu=torch.full((SLOTS,), 101, dtype=torch.int32, device=device)),
            num_computed_tokens=SimpleNamespace(gpu=torch.full((SLOTS,), 100, dtype=torch.int32, device=device)),
            draft_tokens=torch.zeros(SLOTS, DRAFTS, dtype=torch.int64, device=device),
        )
        self._ids = ids
        self._work = work
        self._matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16) / size
        self._idx = torch.arange(SLOTS, device=device)
        self._sampled = torch.ones(SLOTS, DRAFTS + 1, dtype=torch.int64, device=device)
        self._ones = torch.ones(SLOTS, dtype=torch.int32, device=device)

    def schedule(self) -> Any:
        """
        What the scheduler says next: one token and three drafts for each request.
        """
        computed = self.req_states.num_computed_tokens_np + 1
        return SimpleNamespace(
            scheduled_new_reqs=[],
            finished_req_ids=set(),
            preempted_req_ids=set(),
            total_num_scheduled_tokens=SLOTS * (DRAFTS + 1),
            num_scheduled_tokens=dict.fromkeys(self._ids, DRAFTS + 1),
            scheduled_spec_decode_tokens={request_id: [0] * DRAFTS for request_id in self._ids},
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=self._ids,
                resumed_req_ids=set(),
                num_computed_tokens=computed.tolist(),
                num_output_tokens=(computed - 49).tolist(),
            ),
        )

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> Any:
        """
        Use what was received, update the state, enqueue the model.
        """
        self.pp_handler.get_prev_sampled_outputs(self.req_states.draft_tokens)
        self.update_requests(scheduler_output)
        product = self._matrix
        for _ in range(self._work):
            product = product @ self._matrix
        return None if self.last_rank else SimpleNamespace(tensors={})

    def update_requests(self, scheduler_output: Any) -> None:
        """
        Take the scheduler's lengths over, on the host; the device's follow behind the work that is enqueued.
        """
        self.req_states.num_computed_tokens_np[:] = scheduler_output.scheduled_cached_reqs.num_computed_tokens
        self.req_states.num_computed_tokens.gpu.add_(1)
        self.req_states.total_len.gpu.add_(1)

    def sample_tokens(self, grammar_output: Any = None) -> None:
        """
        Send what was sampled and the drafts, or receive them.
        """
        batch = SimpleNamespace(
            num_reqs=SLOTS,
            req_ids=self._ids,
            idx_mapping=self._idx,
            idx_mapping_np=np.arange(SLOTS),
            num_computed_tokens_np=self.req_states.num_computed_tokens_np,
            num_scheduled_tokens=np.full(SLOTS, DRAFTS + 1, np.int32),
            prefill_len_np=np.full(SLOTS, 50, np.int32),
            is_prefilling_np=np.zeros(SLOTS, bool),
            max_seq_len_np=None,
        )
        if self.last_rank:
            self.pp_handler.broadcast(self._sampled, self._ones, self._ones, batch)
            self.pp_handler.broadcast_drafts(self.req_states.draft_tokens, batch)
        else:
            self.pp_handler.receive(batch)
