"""
The entry point that vLLM calls, bare, in every one of its processes.

It patches one method of one class and returns; everything else waits until a worker's device is up. So front end,
engine core and helper processes never run more of Rankscope than this.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from rankscope_exporter.faults import LOGGER

logger = logging.getLogger(LOGGER)

_MARK = "_rankscope"


def is_off(environment: Mapping[str, str]) -> bool:
    """
    Whether RANKSCOPE_ENABLED turns Rankscope off; read by itself, as no other process than a worker needs the settings.
    """
    return environment.get("RANKSCOPE_ENABLED", "1").strip().lower() in {"0", "false", "no", "off"}


def register() -> None:
    """
    Patch `WorkerWrapperBase.init_device`, once per process. Never raises.
    """
    try:
        if is_off(os.environ):
            return
        from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415  only there under vLLM

        original = WorkerWrapperBase.init_device
        if hasattr(original, _MARK):
            return

        @functools.wraps(original)
        def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            attach(self)
            return result

        setattr(init_device, _MARK, original)
        WorkerWrapperBase.init_device = init_device
    except Exception as error:
        logger.warning("rankscope: not installed, vLLM runs without it", exc_info=error)


def attach(wrapper: Any) -> None:
    """
    Install the hooks on the worker's model runner, once, which holds the installation as `_rankscope`. Never raises.
    """
    try:
        from rankscope_exporter.hooks.install import install  # noqa: PLC0415  other processes never need it
        from rankscope_exporter.identity import read_identity  # noqa: PLC0415
        from rankscope_exporter.settings import WorkerSettings  # noqa: PLC0415

        settings = WorkerSettings()
        if not settings.enabled:
            return
        runner = wrapper.worker.model_runner
        if getattr(runner, "_rankscope", None) is not None:
            return
        identity = read_identity(wrapper, runner, wrapper.vllm_config, settings.request_ids)
        installation = install(runner, identity, settings, completes=_completes())
        with contextlib.suppress(Exception):  # a runner may refuse attributes; the hooks, if any, hold it as well
            runner._rankscope = installation  # noqa: SLF001
    except Exception as error:
        logger.warning(
            "rankscope: not installed on this worker, vLLM runs without it: this rank is blind", exc_info=error
        )


def _completes() -> bool:
    """
    Whether a collective call of the pipeline group returns only at completion: with gloo it does, on a device it is enqueued.
    """
    import torch.distributed  # noqa: PLC0415
    from vllm.distributed.parallel_state import get_pp_group  # noqa: PLC0415

    return str(torch.distributed.get_backend(get_pp_group().device_group)) == "gloo"
