"""
A stand-in for vLLM's V1 model runner, for unit tests of what is put around it.

Its methods have the names, parameters and order of calls of the real ones; its `_update_states` has the shape that
the trim fix looks for, in a module with a file, so the real fix applies to it.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from rankscope_exporter.contract import RankIdentity


class StandInRunner:
    """
    A runner of one rank with `requests` requests; `masked` holds the ids whose token is discarded.
    """

    def __init__(self, requests: int = 3, *, is_last_rank: bool = False) -> None:
        self.is_last_rank = is_last_rank
        self.requests = {
            f"r{n}": SimpleNamespace(output_token_ids=[-1] * 10, prev_num_draft_len=0, num_tokens=20)
            for n in range(requests)
        }
        ids = list(self.requests)
        self.input_batch = SimpleNamespace(
            num_reqs=requests,
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            prev_sampled_token_ids=None,
        )
        self.discard_request_mask = SimpleNamespace(np=np.zeros(16, dtype=bool))
        self.log: list[str] = []
        self.posted = 0

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self.log.append("execute_model")
        self._update_states(scheduler_output)
        return SimpleNamespace(tensors={}) if scheduler_output.total_num_scheduled_tokens else "empty"

    def _update_states(self, scheduler_output: Any) -> None:
        self.log.append("_update_states")
        cached = scheduler_output.scheduled_cached_reqs
        is_last_rank = self.is_last_rank
        for i, req_id in enumerate(cached.req_ids):
            req_state = self.requests[req_id]
            num_output_tokens = cached.num_output_tokens[i]
            optimistic = req_state.prev_num_draft_len
            req_state.output_token_ids.extend([-1] * optimistic)
            if not is_last_rank:
                pass
            elif num_output_tokens < len(req_state.output_token_ids):
                del req_state.output_token_ids[num_output_tokens:]

    def sample_tokens(self, grammar_output: Any) -> str:
        self.log.append("sample_tokens")
        if self.is_last_rank:
            self._pp_broadcast_prev_sampled_token_ids(np.zeros((len(self.requests), 1)))
        else:
            self._pp_receive_prev_sampled_token_ids_to_input_batch()
        return "sampled"

    def _pp_broadcast_prev_sampled_token_ids(self, sampled_token_ids: Any) -> None:
        self.log.append("broadcast")
        if not self._is_all_reqs_chunked_prefill():
            self.posted += 1

    def _pp_receive_prev_sampled_token_ids_to_input_batch(self) -> None:
        self.log.append("receive")
        if not self._is_all_reqs_chunked_prefill():
            self.posted += 1
        self.input_batch.prev_sampled_token_ids = np.zeros((len(self.requests), 1))

    def _is_all_reqs_chunked_prefill(self) -> bool:
        self.log.append("guard")
        return bool(self.discard_request_mask.np[: self.input_batch.num_reqs].all())


def schedule(
    runner: StandInRunner,
    *,
    lengths: list[int] | None = None,
    tokens: int = 4,
    new: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
) -> Any:
    """
    A scheduler's output for all requests of `runner`; `lengths` are its output lengths, by default what the runner has.
    """
    ids = list(runner.requests)
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r) for r in new],
        finished_req_ids=set(finished),
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens=dict.fromkeys(ids, 4),
        scheduled_spec_decode_tokens={r: [1, 2, 3] for r in ids},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=ids,
            resumed_req_ids=set(),
            all_token_ids={},
            num_output_tokens=lengths
            if lengths is not None
            else [len(s.output_token_ids) for s in runner.requests.values()],
            num_computed_tokens=[19] * len(ids),
        ),
    )


def take_step(runner: StandInRunner, scheduler_output: Any) -> None:
    """
    What a vLLM worker does with one scheduler output.
    """
    runner.execute_model(scheduler_output)
    if scheduler_output.total_num_scheduled_tokens:
        runner.sample_tokens(None)


def identity(**changes: Any) -> RankIdentity:
    """
    The first rank of two, with `changes`.
    """
    return RankIdentity(
        **{
            "engine": "e1", "dp_rank": 0, "pp_rank": 0, "tp_rank": 0, "pp_size": 2, "tp_size": 1, "dp_size": 1, "global_rank": 0,
            "host": "node", "pid": 1, "model": "m", "vllm_version": "0.27.1", "runner": "V1", "runner_class": "StandIn",
            "device": "cpu", "async_scheduling": True, "spec_method": "draft_model", "spec_tokens": 3, "exporter_version": "0",
            **changes,
        }
    )  # fmt: skip
