"""
One run of real vLLM without a server, in the lab environment's Python: seeded requests, some aborted, and a line of facts.

`python -m rankscope_lab.v2.offline '{"target": ..., ...}'` takes the fields of `Settings` as JSON. Its last line on
standard output is one JSON object: what was asked for, what came, and a digest of the tokens of all requests that are not
to be aborted. The environment (`rankscope_lab.v2.launch`) says which model runner it is.
"""

import hashlib
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from rankscope_lab.counting import wrong_tokens
from rankscope_lab.v2.workload import BLOCK, Request, draw

NGRAM_LONGEST, NGRAM_SHORTEST = 3, 1
MEMORY_SHARE = 0.3
"""
Of the machine's memory, for KV blocks, where their number is not given.
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """
    What is run.
    """

    target: str
    """Directory of the target."""
    method: str = "none"
    """`none`, or a method of speculative decoding."""
    drafter: str = ""
    """Directory of what the method loads, if it loads anything."""
    draft_tokens: int = 3
    asynchronous: bool = True
    pipeline_ranks: int = 2
    tensor_ranks: int = 1
    requests: int = 20
    seed: int = 0
    slots: int = 6
    """Requests in a batch."""
    batch_tokens: int = 64
    """Tokens of a step: longer prompts come in chunks."""
    context: int = 160
    blocks: int = 0
    """KV blocks of 32 tokens; few of them force preemption, 0 leaves it to vLLM."""
    aborted: float = 0.2
    """Share of the requests that are aborted midway."""
    answer: int = 0
    """Tokens that each request asks for; 0: each asks for another number."""

    def draw(self) -> list[Request]:
        """
        The requests of the run.
        """
        return draw(self.requests, seed=self.seed, context=self.context, aborted=self.aborted, answer=self.answer)


def main() -> int:
    """
    Run, and print the facts.
    """
    settings = Settings(**json.loads(sys.argv[1]))
    began = time.monotonic()
    llm = _start(settings)
    ready = time.monotonic()
    requests = settings.draw()
    answers, aborted = _send(llm.llm_engine, requests)
    config = llm.llm_engine.vllm_config
    # When an abort takes effect depends on time; what is not to be aborted has the same tokens in every run.
    whole = {request.name: answers[request.name] for request in requests if request.abort_after is None}
    facts = {
        "vllm": __import__("vllm").__version__,
        "method": settings.method,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "requests": len(requests),
        "aborted": len(aborted),
        "completed": sum(len(answers[r.name]) == r.tokens for r in requests if r.name not in aborted),
        "tokens": sum(map(len, whole.values())),
        "wrong_tokens": sum(wrong_tokens(r.prompt, answers[r.name]) for r in requests),
        "preemptions": _counter(llm, "vllm:num_preemptions"),
        "accepted_drafts": _counter(llm, "vllm:spec_decode_num_accepted_tokens"),
        "digest": hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16],
        "boot_seconds": round(ready - began, 1),
        "run_seconds": round(time.monotonic() - ready, 1),
    }
    print(json.dumps(facts), flush=True)
    return 0


def _start(settings: Settings) -> Any:
    from vllm import LLM  # type: ignore[import-not-found]  # only in the lab's environments

    extra: dict[str, Any] = {}
    if settings.blocks:
        extra |= {"block_size": BLOCK, "num_gpu_blocks_override": settings.blocks}
    if settings.method != "none":
        speculation: dict[str, Any] = {"method": settings.method, "num_speculative_tokens": settings.draft_tokens}
        if settings.method.startswith("ngram"):
            speculation |= {"prompt_lookup_max": NGRAM_LONGEST, "prompt_lookup_min": NGRAM_SHORTEST}
        if settings.drafter:
            speculation |= {"model": settings.drafter, "draft_load_config": {"load_format": "dummy"}}
        extra["speculative_config"] = speculation
    return LLM(
        model=settings.target,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=settings.context,
        max_num_seqs=settings.slots,
        max_num_batched_tokens=settings.batch_tokens,
        enable_prefix_caching=False,
        pipeline_parallel_size=settings.pipeline_ranks,
        tensor_parallel_size=settings.tensor_ranks,
        async_scheduling=settings.asynchronous,
        distributed_executor_backend="mp",
        gpu_memory_utilization=MEMORY_SHARE,
        disable_log_stats=False,
        **extra,
    )


def _send(engine: Any, requests: list[Request]) -> tuple[dict[str, list[int]], set[str]]:
    """
    The tokens that each request got, and which requests were aborted.
    """
    from vllm import SamplingParams

    for request in requests:
        sampling = SamplingParams(max_tokens=request.tokens, temperature=0.0, detokenize=False, ignore_eos=True)
        engine.add_request(request.name, {"prompt_token_ids": list(request.prompt)}, sampling)
    early = {request.name: request.abort_after for request in requests if request.abort_after is not None}
    answers: dict[str, list[int]] = {request.name: [] for request in requests}
    aborted: set[str] = set()
    while engine.has_unfinished_requests():
        for output in engine.step():
            name = output.request_id
            answers[name] = list(output.outputs[0].token_ids)
            if not output.finished and len(answers[name]) >= early.get(name, sys.maxsize) and name not in aborted:
                aborted.add(name)
                engine.abort_request([name])
    return answers, aborted


def _counter(llm: Any, name: str) -> int:
    """
    A counter of vLLM's own metrics; 0 where it counts nothing of the kind.
    """
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


if __name__ == "__main__":
    sys.exit(main())
