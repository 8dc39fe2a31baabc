"""
What the hooks of one healthy step cost beside a bare loop that reads the same lengths, and how many system calls they make.

Both are timed in turn in one process, and the ratio of their best rounds is the figure: absolute times belong to the
machine, and a round is only ever slowed down by others. The runners, V1 and V2, are stand-ins whose methods do
nothing, so what is timed is ours alone. Of V2 both sides of the exchange are timed, and the dearer one is the figure.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from figures import Figures, progress
from standin import identity

from rankscope_exporter.hooks.install import Installation
from rankscope_exporter.settings import WorkerSettings


class V1Runner:
    """
    A V1 model runner with a batch of `requests` requests whose methods return at once.
    """

    kind = "V1"

    def __init__(self, requests: int) -> None:
        self.requests = {
            f"cmpl-{n:032x}-0": SimpleNamespace(
                output_token_ids=[-1] * (50 + n), prev_num_draft_len=3, num_tokens=100 + n
            )
            for n in range(requests)
        }
        ids = list(self.requests)
        self.input_batch = SimpleNamespace(
            num_reqs=requests,
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            prev_sampled_token_ids=None,
        )
        self.discard_request_mask = SimpleNamespace(np=np.zeros(1024, dtype=bool))

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        self._update_states(scheduler_output)

    def _update_states(self, scheduler_output: Any) -> None: ...

    def sample_tokens(self, grammar_output: Any) -> None:
        self._pp_receive_prev_sampled_token_ids_to_input_batch()

    def _pp_broadcast_prev_sampled_token_ids(self, sampled_token_ids: Any) -> None: ...

    def _pp_receive_prev_sampled_token_ids_to_input_batch(self) -> None:
        self._is_all_reqs_chunked_prefill()

    def _is_all_reqs_chunked_prefill(self) -> bool:
        return False


class Shape:
    """
    What is read of a device tensor.
    """

    def __init__(self, *shape: int) -> None:
        self.shape = shape


class PPHandler:
    """
    The pipeline handler of V2, with the width rule and the attributes of vLLM's; it sends nothing.
    """

    def __init__(self, requests: int) -> None:
        rows = np.arange(requests, dtype=np.int32)
        self.max_sample_len, self.num_speculative_steps = 4, 3
        self.req_idx_gen_np = np.zeros(1024, dtype=np.int32)
        slot = SimpleNamespace(
            event=SimpleNamespace(query=lambda: True), sampled_tokens=Shape(requests, 4), idx_mapping_np=rows,
            gen_at_receive_np=self.req_idx_gen_np[rows],
        )  # fmt: skip
        self.queue = deque([slot, slot])

    def get_prev_sampled_outputs(self, draft_tokens_to_update: Any = None) -> None: ...

    def receive(self, input_batch: Any) -> None:
        compute_need_sampled_mask(input_batch)

    def broadcast(self, sampled_token_ids: Any, num_sampled: Any, num_rejected: Any, input_batch: Any) -> None:
        compute_need_sampled_mask(input_batch)

    def broadcast_drafts(self, draft_tokens: Any, input_batch: Any) -> None:
        compute_need_sampled_mask(input_batch)


def compute_need_sampled_mask(input_batch: Any) -> Any:
    """
    VLLM's name for it; the answer is at hand.
    """
    return input_batch.needed


class V2Runner:
    """
    A V2 model runner, sender or receiver, with a batch of `requests` requests whose methods return at once.
    """

    kind = "V2"

    def __init__(self, requests: int, *, last: bool = False) -> None:
        self.requests = [f"cmpl-{n:032x}-0" for n in range(requests)]
        self.last = last
        self.pp_handler = PPHandler(requests)
        self.req_states = SimpleNamespace(
            req_id_to_index={request: row for row, request in enumerate(self.requests)},
            num_computed_tokens_np=np.arange(90, 90 + 1024, dtype=np.int32),
            prompt_len=SimpleNamespace(np=np.zeros(1024, dtype=np.int32)),
        )
        self.input_batch = SimpleNamespace(
            num_reqs=requests, req_ids=self.requests, needed=np.ones(requests, dtype=bool)
        )
        self.sampled = Shape(requests, 4)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> None:
        self.pp_handler.get_prev_sampled_outputs()
        self.update_requests(scheduler_output)

    def update_requests(self, scheduler_output: Any) -> None: ...

    def sample_tokens(self, grammar_output: Any) -> None:
        if self.last:
            self.pp_handler.broadcast(self.sampled, None, None, self.input_batch)
            self.pp_handler.broadcast_drafts(None, self.input_batch)
        else:
            self.pp_handler.receive(self.input_batch)

    def pool(self) -> None: ...


Runner = V1Runner | V2Runner


def schedule(runner: Runner) -> Any:
    """
    A scheduler's output for all requests of `runner`, in agreement with it.
    """
    ids = list(runner.requests)
    return SimpleNamespace(
        scheduled_new_reqs=[],
        finished_req_ids=set(),
        preempted_req_ids=set(),
        total_num_scheduled_tokens=4 * len(ids),
        num_scheduled_tokens=dict.fromkeys(ids, 4),
        scheduled_spec_decode_tokens={r: [1, 2, 3] for r in ids},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=ids,
            resumed_req_ids=set(),
            all_token_ids={},
            num_output_tokens=[50 + n for n in range(len(ids))],
            num_computed_tokens=[90 + n for n in range(len(ids))],
        ),
    )


def v1_loop(runner: V1Runner, scheduler_output: Any) -> tuple[int, int, int, int, int]:
    """
    The least that has to be read for a step: each request's length, the scheduler's, its computed tokens, and the mask.
    """
    cached = scheduler_output.scheduled_cached_reqs
    requests = runner.requests
    total = wanted_total = computed_total = worst = 0
    for request_id, wanted, computed in zip(
        cached.req_ids, cached.num_output_tokens, cached.num_computed_tokens, strict=True
    ):
        length = len(requests[request_id].output_token_ids)
        total += length
        wanted_total += wanted
        computed_total += computed
        if length - wanted > worst:
            worst = length - wanted
    masked = int(np.count_nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs]))
    return total, wanted_total, computed_total, worst, masked


def v2_loop(runner: V2Runner, scheduler_output: Any) -> tuple[int, int, int, int, int]:
    """
    The same of a V2 runner, whose lengths are an array: they are taken out in one go, as that is quicker.
    """
    cached = scheduler_output.scheduled_cached_reqs
    index = runner.req_states.req_id_to_index
    lengths = runner.req_states.num_computed_tokens_np[[index[request_id] for request_id in cached.req_ids]].tolist()
    total = wanted_total = output_total = worst = 0
    for length, wanted, outputs in zip(lengths, cached.num_computed_tokens, cached.num_output_tokens, strict=True):
        total += length
        wanted_total += wanted
        output_total += outputs
        if length - wanted > worst:
            worst = length - wanted
    masked = runner.input_batch.num_reqs - int(np.count_nonzero(runner.input_batch.needed))
    return total, wanted_total, output_total, worst, masked


def install(runner: Runner, directory: str) -> Installation:
    """
    The real hooks on `runner`, all of them on.
    """
    last = isinstance(runner, V2Runner) and runner.last
    installation = Installation(
        runner,
        identity(engine="bench", runner=runner.kind, pp_rank=int(last)),
        WorkerSettings(flight_dir=Path(directory)),
    )
    installation.start_fix()
    installation.start_hooks(completes=isinstance(runner, V1Runner))
    states = {report.hook: report.state.value for report in installation.hooks.values()}
    assert set(states.values()) == {"on"}, states
    return installation


def time_rounds(step: Any, rounds: int, steps: int) -> list[float]:
    """
    Nanoseconds per call of `step` in each of `rounds` rounds.
    """
    found = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(steps):
            step()
        found.append((time.perf_counter_ns() - start) / steps)
    return found


def measure(make: Callable[[], Any], bare_loop: Callable[..., Any], rounds: int, steps: int) -> dict[str, float]:
    """
    Nanoseconds of a step, best round, with hooks, the same calls without them, and the bare loop; rounds alternate.
    """
    plain, hooked = make(), make()
    output = schedule(hooked)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        installation = install(hooked, directory)

        def run(runner: Runner) -> None:
            runner.execute_model(output)
            runner.sample_tokens(None)

        times: dict[str, list[float]] = {"hooked": [], "plain": [], "bare": []}
        bodies = {"hooked": lambda: run(hooked), "plain": lambda: run(plain), "bare": lambda: bare_loop(plain, output)}
        for body in bodies.values():
            time_rounds(body, 1, steps)
        gc.collect()
        gc.disable()
        for _ in range(rounds):
            for name, body in bodies.items():
                times[name] += time_rounds(body, 1, steps)
        gc.enable()
        installation.uninstall()
    return {name: min(values) for name, values in times.items()}


def grown_bytes(runner: Runner, steps: int) -> int:
    """
    Bytes that Python holds more after `steps` healthy steps than after as many before.
    """
    output = schedule(runner)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        installation = install(runner, directory)

        def run() -> None:
            for _ in range(steps):
                runner.execute_model(output)
                runner.sample_tokens(None)

        run()
        tracemalloc.start()
        run()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        run()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        installation.uninstall()
    return after - before


def installed_bytes(runner: Runner) -> tuple[int, int]:
    """
    What a rank holds once its hooks are on: bytes of its flight file, and bytes of Python's.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        install(runner, f"{directory}/first").uninstall()  # what the first one fills for all (caches) is not a rank's
        gc.collect()
        tracemalloc.start()
        installation = install(runner, directory)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert installation.flight is not None
        size = installation.flight.path.stat().st_blocks * 512
        installation.uninstall()
    return size, held


def count_calls(kind: str, steps: int) -> int:
    """
    System calls of this program when it takes `steps` hooked steps of a `kind` of runner and exits, by strace.

    Raises:
        FileNotFoundError: strace is not installed (Debian package `strace`).

    """
    with tempfile.NamedTemporaryFile() as summary:
        command = [
            "strace",
            "-f",
            "-c",
            "-o",
            summary.name,
            sys.executable,
            __file__,
            "--steps-only",
            str(steps),
            "--kind",
            kind,
        ]
        subprocess.run(command, check=True)
        last = Path(summary.name).read_text().strip().splitlines()[-1].split()
    return int(last[2] if "." in last[2] else last[3] if last[3].isdigit() else last[2])


def take_steps(runner: Runner, steps: int) -> None:
    """
    Take hooked steps and nothing else, for strace to watch.
    """
    output = schedule(runner)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        installation = install(runner, directory)
        for _ in range(steps):
            runner.execute_model(output)
            runner.sample_tokens(None)
        installation.uninstall()


KINDS: dict[str, Callable[[], Runner]] = {
    "v1": lambda: V1Runner(64),
    "v2": lambda: V2Runner(64),
}


def report_ratios(figures: Figures, requests: int, rounds: int) -> None:
    """
    The ratios of both runners for a batch of `requests` requests.
    """
    steps = max(8, 1600 // requests)
    progress(f"hotpath: V1, {requests} requests")
    found = measure(lambda: V1Runner(requests), v1_loop, rounds, steps)
    figures.report(f"ratio_{requests}", ratio(found), "<= 3", **nanoseconds(found))
    progress(f"hotpath: V2, {requests} requests")
    sides = {
        side: measure(lambda last=last: V2Runner(requests, last=last), v2_loop, rounds, steps)
        for side, last in (("receiver", False), ("sender", True))
    }
    dearer = max(sides, key=lambda side: ratio(sides[side]))
    figures.report(
        f"v2_ratio_{requests}", ratio(sides[dearer]), "<= 3", side=dearer, **nanoseconds(sides[dearer]),
        **{f"ratio_{side}": ratio(times) for side, times in sides.items()},
    )  # fmt: skip


def ratio(found: dict[str, float]) -> float:
    """
    What the hooks cost in bare loops.
    """
    return round((found["hooked"] - found["plain"]) / found["bare"], 2)


def nanoseconds(found: dict[str, float]) -> dict[str, int]:
    """
    The times behind a ratio.
    """
    return {
        "hooks_ns": round(found["hooked"] - found["plain"]),
        "bare_ns": round(found["bare"]),
        "calls_ns": round(found["plain"]),
    }


def main() -> int:
    """
    Print the figures.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps-only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, default="v1", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps_only is not None:
        take_steps(KINDS[arguments.kind](), arguments.steps_only)
        return 0
    figures = Figures("hotpath")
    for requests in (8, 64, 256):
        report_ratios(figures, requests, arguments.rounds)
    few, many = 100, 5100
    for kind, make in KINDS.items():
        prefix = "" if kind == "v1" else f"{kind}_"
        progress(f"hotpath: {kind.upper()}, system calls")
        calls = count_calls(kind, many) - count_calls(kind, few)
        # The interpreter itself differs by a few calls from run to run (memory maps); 5,000 steps would show.
        figures.report(
            f"{prefix}system_calls_per_step", round(calls / (many - few), 4), "<= 0.01", calls=calls, steps=many - few
        )
        progress(f"hotpath: {kind.upper()}, memory")
        figures.report(
            f"{prefix}grown_bytes_per_step", round(grown_bytes(make(), 4000) / 4000, 3), "<= 0.1", steps=4000
        )
        flight, held = installed_bytes(make())
        figures.report(f"{prefix}memory_per_rank_bytes", flight + held, "<= 1200000", flight_file=flight, python=held)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
