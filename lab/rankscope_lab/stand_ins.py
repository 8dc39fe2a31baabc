"""
What stands for a GPU where vLLM runs on a CPU: each function changes one thing at class level, and says what it stands for.

Nothing here touches scheduling, request state, guards or collectives: those are vLLM's own, as they were released.
"""

import functools
import os
from typing import Any

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def keep_async_scheduling(platform: Any) -> None:
    """
    Stands for a GPU: the CPU platform turns async scheduling off, because it gains nothing there.
    """
    stock = platform.check_and_update_config.__func__

    @functools.wraps(stock)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    platform.check_and_update_config = classmethod(check_and_update_config)


def keep_start_method(platform: Any) -> None:
    """
    Stands for a GPU: the CPU platform has every process spawned, where others fork if `VLLM_WORKER_MULTIPROC_METHOD` says so.
    """
    stock = platform.check_and_update_config.__func__

    @functools.wraps(stock)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = os.environ.get(START_METHOD)
        stock(cls, vllm_config)
        if wanted:
            os.environ[START_METHOD] = wanted

    platform.check_and_update_config = classmethod(check_and_update_config)


def allocate_intermediate_tensors(runner_class: Any) -> None:
    """
    Stands for the warm-up of a GPU: an eager V1 runner on a CPU never makes the dummy pass that allocates these buffers.
    """
    stock = runner_class.sync_and_gather_intermediate_tensors

    @functools.wraps(stock)
    def sync_and_gather_intermediate_tensors(
        self: Any, num_tokens: int, intermediate_tensors: Any, sync_self: bool
    ) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return stock(self, num_tokens, intermediate_tensors, sync_self)

    runner_class.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors


def accept_integer_masks(builder: Any, language: Any, handle: Any) -> None:
    """
    Stands for Triton's compiler: vLLM masks some loads and stores with integers, and only the interpreter insists on booleans.

    The arguments are the interpreter's `InterpreterBuilder`, `triton.language`, and the interpreter's `TensorHandle`.
    """
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_boolean(mask: Any) -> Any:
        return mask if mask.data.dtype == bool else handle(mask.data.astype(bool), language.int1)

    @functools.wraps(load)
    def create_masked_load(self: Any, pointers: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return load(self, pointers, as_boolean(mask), *args, **kwargs)

    @functools.wraps(store)
    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return store(self, pointers, value, as_boolean(mask), *args, **kwargs)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store
