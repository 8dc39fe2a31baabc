"""
vLLM plugin: stock vLLM on a CPU, with either model runner. It changes only what stands for a GPU (`rankscope_lab.stand_ins`).

Active only with `RANKSCOPE_LAB=stock`. `RANKSCOPE_LAB_TRACE=DIR` writes the trace of a V2 run (`rankscope_lab.v2.trace`).
"""

import os

from rankscope_lab import stand_ins

STOCK = "stock"
"""
The value of `RANKSCOPE_LAB` under which this plugin is active.
"""

_MARK = "_rankscope_lab_stock"


def register() -> None:
    """
    Entry point `vllm.general_plugins`. It may raise: a lab without its stand-ins proves nothing.
    """
    if os.environ.get("RANKSCOPE_LAB") != STOCK:
        return
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, _MARK):
        return
    setattr(CpuPlatform, _MARK, True)
    stand_ins.keep_async_scheduling(CpuPlatform)
    stand_ins.keep_start_method(CpuPlatform)
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        stand_ins.allocate_intermediate_tensors(GPUModelRunner)
        return
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    stand_ins.accept_integer_masks(InterpreterBuilder, language, TensorHandle)
    if directory := os.environ.get("RANKSCOPE_LAB_TRACE"):
        from rankscope_lab.v2 import trace

        trace.install(directory, outside=os.environ.get("RANKSCOPE_LAB_TRACE_OUTSIDE") == "1")
