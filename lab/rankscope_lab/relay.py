"""
vLLM plugin: what stock vLLM 0.27.1 lacks for pipeline parallelism, async scheduling and speculative decoding at once.

Stock V1 asserts that the last rank sends one sampled column and gives the first rank no drafter. Forks that do run the
combination relay, besides the sampled token, the accepted counts and the drafts, so that the first rank embeds what the
last rank verifies. This plugin does that, at class level, around vLLM's own code: scheduler, request state, discard
mask, guard and trim stay as they are, and sender and receiver ask vLLM's own guard once a step, from the same two
methods as in stock. What else stands in the way on a CPU is changed too (`rankscope_lab.stand_ins`); each change says what
it stands for.

Active only with `RANKSCOPE_LAB=1`. Knobs: `LAB_ACCEPT` (share of right drafts, 0 to 1), `LAB_SEED`, `LAB_PACE_MS`
(milliseconds that the drafter sleeps in each step, so that steps are as slow as a real model's).
"""

import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankscope_lab import stand_ins

SUPPORTED = "0.27."
"""
vLLM releases whose sender and receiver this plugin knows.
"""

_MARK = "_rankscope_lab_relay"


@dataclass(frozen=True, slots=True)
class Knobs:
    """
    How good and how slow the drafter is.
    """

    acceptance: float = 0.9
    seed: int = 0
    pace_seconds: float = 0.0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "Knobs":
        """
        The knobs that `environ` sets.

        Raises:
            ValueError: one is not a number, or out of its range.

        """
        knobs = cls(
            acceptance=float(environ.get("LAB_ACCEPT", "0.9")),
            seed=int(environ.get("LAB_SEED", "0")),
            pace_seconds=float(environ.get("LAB_PACE_MS", "0")) / 1000,
        )
        if not 0 <= knobs.acceptance <= 1 or knobs.pace_seconds < 0:
            msg = "LAB_ACCEPT must lie between 0 and 1, and LAB_PACE_MS must not be negative"
            raise ValueError(msg)
        return knobs


def register() -> None:
    """
    Entry point `vllm.general_plugins`. Unlike Rankscope's own plugin it may raise: a lab without its relay proves nothing.

    Raises:
        RuntimeError: the installed vLLM is not one that the relay knows.
        ValueError: a knob is wrong.

    """
    if os.environ.get("RANKSCOPE_LAB") != "1":
        return
    knobs = Knobs.read(os.environ)
    import vllm
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import gpu_model_runner

    if getattr(gpu_model_runner, _MARK, False):
        return
    if not vllm.__version__.startswith(SUPPORTED):
        msg = f"the lab's relay knows vLLM {SUPPORTED}x, not {vllm.__version__}: run `make lab-setup`"
        raise RuntimeError(msg)
    stand_ins.keep_async_scheduling(CpuPlatform)
    stand_ins.allocate_intermediate_tensors(gpu_model_runner.GPUModelRunner)
    _give_every_rank_a_drafter(gpu_model_runner)
    _draft_by_counting(gpu_model_runner.DraftModelProposer, knobs)
    _relay_drafts(gpu_model_runner.GPUModelRunner, knobs)
    setattr(gpu_model_runner, _MARK, True)


def _give_every_rank_a_drafter(module: Any) -> None:
    """
    Stands for a fork's repair: stock V1 reads `self.drafter` on ranks that have none.
    """
    runner_class = module.GPUModelRunner
    stock = runner_class.__init__

    class NoDrafter(module.DraftModelProposer):  # type: ignore[misc]  # vLLM is not there to be checked
        def __init__(self) -> None:
            self.__dict__["kv_cache_gid"] = -1

        def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
            pass

        initialize_cudagraph_keys = initialize_attn_backend = load_model = _nothing
        dummy_run = validate_same_kv_cache_group = _nothing

    @functools.wraps(stock)
    def with_drafter(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if self.speculative_config and not hasattr(self, "drafter"):
            self.drafter = NoDrafter()

    runner_class.__init__ = with_drafter


def _draft_by_counting(proposer_class: Any, knobs: Knobs) -> None:
    """
    Stands for a drafter's forward pass: it takes its time, and returns the drafts that were already relayed.
    """

    def propose(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        time.sleep(knobs.pace_seconds)
        return self.rankscope_lab_drafts

    proposer_class.propose = propose


def _relay_drafts(runner_class: Any, knobs: Knobs) -> None:
    """
    Stands for a fork's relay: accepted counts and drafts follow the sampled tokens, on the same group, in one message.

    A fork sends the drafts later in the step, when its drafter has run. Here they follow from the sampled tokens
    alone, so that everything goes out of `_pp_broadcast_prev_sampled_token_ids`, and comes in at its counterpart.
    Near the end of the context vLLM discards the drafts of the last rank; the lab's requests end before that.

    Whether the second message goes out is read from the discard mask that vLLM's guard has just read: each rank its
    own, at its own moment, which is what makes ranks part when their masks do.
    """
    import numpy as np
    import torch
    from vllm.distributed.parallel_state import get_pp_group

    from rankscope_lab.acceptance import drafts

    stock_send = runner_class._pp_broadcast_prev_sampled_token_ids
    stock_receive = runner_class._pp_receive_prev_sampled_token_ids_to_input_batch

    def relays(self: Any) -> bool:
        return not bool(self.discard_request_mask.np[: self.input_batch.num_reqs].all())

    @functools.wraps(stock_send)
    def _pp_broadcast_prev_sampled_token_ids(self: Any, sampled_token_ids: Any) -> None:
        if self.speculative_config is None:
            stock_send(self, sampled_token_ids)
            return
        next_tokens, counts = self.drafter.prepare_next_token_ids_padded(
            sampled_token_ids, self.requests, self.input_batch, self.discard_request_mask.gpu
        )
        prompts = [self.requests[request_id].prompt_token_ids for request_id in self.input_batch.req_ids]
        proposed = torch.from_numpy(
            drafts(
                prompts,
                next_tokens.numpy().astype(np.int32),
                self.num_spec_tokens,
                acceptance=knobs.acceptance,
                seed=knobs.seed,
            )
        )
        self.drafter.rankscope_lab_drafts = proposed
        stock_send(self, next_tokens.to(torch.int32).unsqueeze(1).contiguous())
        if relays(self):
            pp = get_pp_group()
            message = torch.cat([counts.to(torch.int32).unsqueeze(1), proposed], dim=1).contiguous()
            torch.distributed.broadcast(message, src=pp.rank, group=pp.device_group)

    @functools.wraps(stock_receive)
    def _pp_receive_prev_sampled_token_ids_to_input_batch(self: Any) -> None:
        stock_receive(self)
        if self.speculative_config is None:
            return
        pp = get_pp_group()
        message = torch.zeros((self.input_batch.num_reqs, 1 + self.num_spec_tokens), dtype=torch.int32)
        if relays(self):
            torch.distributed.broadcast(message, src=pp.last_rank, group=pp.device_group)
        self.valid_sampled_token_count_gpu = message[:, 0].contiguous()
        self._draft_token_ids = message[:, 1:].contiguous()

    runner_class._pp_broadcast_prev_sampled_token_ids = _pp_broadcast_prev_sampled_token_ids
    runner_class._pp_receive_prev_sampled_token_ids_to_input_batch = _pp_receive_prev_sampled_token_ids_to_input_batch
