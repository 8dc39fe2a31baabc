"""
What vLLM 0.32's V2 runner computes, rank by rank and step by step, as JSON lines: the ground that flight files are checked against.

It shares no code with the exporter and asks vLLM nothing: it wraps vLLM's own functions and notes what they were given
and what they returned. The guard's mask is the one that vLLM computed for itself, widths are the shapes of tensors that
went into `torch.distributed.broadcast`, and freed rows are counted here. Device values are read too: on a CPU they are free.

`outside=False` wraps vLLM's classes, so that whatever wraps a runner is around the trace; `outside=True` wraps the runner
at its first step, so that the trace is around everything else.
"""

import functools
import json
import time
import types
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

Method = Callable[..., Any]


def read(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """
    The steps of each rank, by its pipeline rank. A line that was cut off is left out.
    """
    found = {}
    for path in sorted(directory.glob("pp*.jsonl")):
        lines = path.read_text().split("\n")[:-1]
        found[int(path.stem.removeprefix("pp"))] = [json.loads(line) for line in lines]
    return found


def install(directory: str, *, outside: bool) -> None:
    """
    Trace every V2 runner of this process into `directory`.
    """
    import torch
    from vllm.v1.worker.gpu import model_runner, pp_utils
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    trace = Trace(Path(directory))
    if outside:
        stock = WorkerWrapperBase.execute_model

        @functools.wraps(stock)
        def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            runner = self.worker.model_runner
            if not trace.around:
                trace.around = True
                trace.wrap_runner(runner)
                trace.wrap_handler(runner.pp_handler)
            return stock(self, *args, **kwargs)

        WorkerWrapperBase.execute_model = execute_model
    else:
        trace.wrap_runner(model_runner.GPUModelRunner)
        trace.wrap_handler(pp_utils.PPHandler)
    trace.wrap_mask(pp_utils)
    trace.wrap_broadcast(torch.distributed)


class Trace:
    """
    The trace of one process, which has one runner.
    """

    def __init__(self, directory: Path) -> None:
        self.around = False
        self._directory = directory
        self._file: Any = None
        self._steps = 0
        self._line: dict[str, Any] | None = None
        self._freed: Counter[int] = Counter()
        """How often each request index was freed."""
        self._received: deque[dict[str, Any] | None] = deque()
        """What this rank has received and not consumed yet, in the order of the handler's queue."""
        self._dropped = 0
        self._handler: Any = None
        self._posting = False

    def _wrap(self, owner: Any, name: str, make: Callable[[Method], Method]) -> None:
        """
        Put something around a method of a class, or of one object; it gets the object as first argument either way.

        It keeps name and signature: others look at them before they wrap.
        """
        stock = getattr(owner, name)
        if isinstance(owner, type):
            setattr(owner, name, functools.wraps(stock)(make(stock)))
        else:
            around = make(lambda _self, *args, **kwargs: stock(*args, **kwargs))
            setattr(owner, name, types.MethodType(around, owner))

    def wrap_runner(self, owner: Any) -> None:
        """
        Steps, lengths, and what becomes of requests.
        """

        def execute_model(stock: Method) -> Method:
            def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                if kwargs.get("dummy_run"):
                    return stock(runner, scheduler_output, *args, **kwargs)
                self._begin(runner, scheduler_output)
                with _Noted(self):
                    result = stock(runner, scheduler_output, *args, **kwargs)
                if not scheduler_output.total_num_scheduled_tokens:
                    self._end()
                return result

            return execute_model

        def update_requests(stock: Method) -> Method:
            def update_requests(runner: Any, scheduler_output: Any) -> Any:
                result = stock(runner, scheduler_output)
                self._note_lengths(runner, scheduler_output)
                return result

            return update_requests

        def prepare_inputs(stock: Method) -> Method:
            def prepare_inputs(runner: Any, *args: Any, **kwargs: Any) -> Any:
                batch = stock(runner, *args, **kwargs)
                self._note_batch(runner, batch)
                return batch

            return prepare_inputs

        def sample_tokens(stock: Method) -> Method:
            def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
                with _Noted(self):
                    result = stock(runner, *args, **kwargs)
                self._end()
                return result

            return sample_tokens

        for make in (execute_model, update_requests, prepare_inputs, sample_tokens):
            self._wrap(owner, make.__name__, make)

    def wrap_handler(self, owner: Any) -> None:
        """
        The receive queue, and which collectives belong to the pipeline's sampled tokens.
        """

        def get_prev_sampled_outputs(stock: Method) -> Method:
            def get_prev_sampled_outputs(handler: Any, *args: Any, **kwargs: Any) -> Any:
                self._consume(handler)
                result = stock(handler, *args, **kwargs)
                if self._line is not None:
                    self._line["queue"] = _queue(handler)
                return result

            return get_prev_sampled_outputs

        def on_req_idx_freed(stock: Method) -> Method:
            def on_req_idx_freed(handler: Any, index: int) -> Any:
                self._freed[int(index)] += 1
                return stock(handler, index)

            return on_req_idx_freed

        def posting(name: str) -> Callable[[Method], Method]:
            def make(stock: Method) -> Method:
                def post(handler: Any, *args: Any) -> Any:
                    self._handler, self._posting = handler, True
                    try:
                        result = stock(handler, *args)
                    finally:
                        self._posting = False
                    if name == "receive":
                        self._receive(handler, args[0])
                    return result

                return post

            return make

        self._wrap(owner, "get_prev_sampled_outputs", get_prev_sampled_outputs)
        self._wrap(owner, "on_req_idx_freed", on_req_idx_freed)
        for name in ("receive", "broadcast", "broadcast_drafts"):
            self._wrap(owner, name, posting(name))

    def wrap_mask(self, module: Any) -> None:
        """
        The guard's masks, in the order in which vLLM's handler asks for them.
        """
        stock = module.compute_need_sampled_mask

        @functools.wraps(stock)
        def compute_need_sampled_mask(input_batch: Any) -> Any:
            mask = stock(input_batch)
            if self._line is not None and self._posting:
                self._line["masks"].append(None if mask is None else [int(needed) for needed in mask])
            return mask

        module.compute_need_sampled_mask = compute_need_sampled_mask

    def wrap_broadcast(self, module: Any) -> None:
        """
        Shapes on the wire.
        """
        stock = module.broadcast

        @functools.wraps(stock)
        def broadcast(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._line is not None and self._posting and kwargs.get("group") is self._handler.broadcast_group:
                self._line["wire"].append([list(tensor.shape), str(tensor.dtype)])
            return stock(tensor, *args, **kwargs)

        module.broadcast = broadcast

    def close(self) -> None:
        """
        Write what is left. A worker ends without it: each line is written when its step ends.
        """
        self._end()
        if self._file is not None:
            self._file.close()

    def _begin(self, runner: Any, scheduler_output: Any) -> None:
        self._end()
        self._steps += 1
        cached = scheduler_output.scheduled_cached_reqs
        self._line = {
            "step": self._steps,
            "tokens": scheduler_output.total_num_scheduled_tokens,
            "new": [new.req_id for new in scheduler_output.scheduled_new_reqs],
            "cached": dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)),
            "finished": sorted(scheduler_output.finished_req_ids),
            "preempted": sorted(scheduler_output.preempted_req_ids or ()),
            "drafting": len(scheduler_output.scheduled_spec_decode_tokens),
            "queue_before": _queue(runner.pp_handler),
            "masks": [],
            "wire": [],
            "dropped_total": self._dropped,
        }

    def _note_lengths(self, runner: Any, scheduler_output: Any) -> None:
        if self._line is None:
            return
        states = runner.req_states
        ids = scheduler_output.scheduled_cached_reqs.req_ids
        self._line["host"] = {name: int(states.num_computed_tokens_np[states.req_id_to_index[name]]) for name in ids}

    def _note_batch(self, runner: Any, batch: Any) -> None:
        if self._line is None:
            return
        states, rows = runner.req_states, batch.idx_mapping_np
        self._line["rows"] = list(batch.req_ids)
        self._line["device"] = {
            "computed": states.num_computed_tokens.gpu[rows].tolist(),
            "total": states.total_len.gpu[rows].tolist(),
        }

    def _receive(self, handler: Any, batch: Any) -> None:
        slot = handler.queue[-1]
        if slot is None:
            return
        self._received[-1] = {
            "rows": [int(index) for index in batch.idx_mapping_np],
            "freed": [self._freed[int(index)] for index in batch.idx_mapping_np],
            "needed": [int(needed) for needed in slot.need_sampled_mask],
        }

    def _consume(self, handler: Any) -> None:
        if not handler.queue:
            return
        while len(self._received) < len(handler.queue):
            self._received.append(None)  # the handler's own placeholders, before anything was received
        slot = self._received.popleft()
        self._received.append(None)
        if slot is None or self._line is None:
            return
        gone = [self._freed[row] != count for row, count in zip(slot["rows"], slot["freed"], strict=True)]
        self._dropped += sum(gone)
        self._line["consumed"] = {
            "rows": len(gone),
            "dropped": sum(gone),
            "dropped_needed": sum(needed for needed, freed in zip(slot["needed"], gone, strict=True) if freed),
        }
        self._line["dropped_total"] = self._dropped

    def note_error(self, error: BaseException) -> None:
        """
        The step ended in an error of vLLM's.
        """
        if self._line is not None:
            self._line["error"] = f"{type(error).__name__}: {error}"[:300]
            self._line["error_unix"] = time.time()
            self._end()

    def _end(self) -> None:
        if self._line is None:
            return
        if self._file is None:
            from vllm.distributed.parallel_state import get_pp_group

            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"pp{get_pp_group().rank_in_group}.jsonl"
            self._file = path.open("w", buffering=1)
        self._file.write(json.dumps(self._line) + "\n")
        self._line = None


class _Noted:
    """
    Notes an error on its way through.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _where: types.TracebackType | None
    ) -> None:
        if error is not None:
            self._trace.note_error(error)


def _queue(handler: Any) -> list[int]:
    """
    Depth of the receive queue, and how many of its slots hold something.
    """
    return [len(handler.queue), sum(slot is not None for slot in handler.queue)]
