"""
What the hooks of one healthy step cost beside a bare loop that reads the same lengths, and how many system calls they make.

Both are timed in turn in one process, and the ratio of their best rounds is the figure: absolute times belong to the
machine, and a round is only ever slowed down by others. The runner is a stand-in whose methods do nothing, so what is timed is ours alone.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
import tracemalloc
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


class Runner:
    """
    A model runner with a batch of `requests` requests whose methods return at once.
    """

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


def schedule(runner: Runner) -> Any:
    """
    A scheduler's output for all requests of `runner`, in agreement with it.
    """
    ids = list(runner.requests)
    return SimpleNamespace(
        scheduled_new_reqs=[],
        finished_req_ids=set(),
        total_num_scheduled_tokens=4 * len(ids),
        num_scheduled_tokens=dict.fromkeys(ids, 4),
        scheduled_spec_decode_tokens={r: [1, 2, 3] for r in ids},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=ids,
            resumed_req_ids=set(),
            all_token_ids={},
            num_output_tokens=[len(s.output_token_ids) for s in runner.requests.values()],
            num_computed_tokens=[90 + n for n in range(len(ids))],
        ),
    )


def bare_loop(runner: Runner, scheduler_output: Any) -> tuple[int, int, int, int, int]:
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


def install(runner: Runner, directory: str) -> Installation:
    """
    The real hooks on `runner`, all of them on.
    """
    installation = Installation(runner, identity(engine="bench"), WorkerSettings(flight_dir=Path(directory)))
    installation.start_fix()
    installation.start_hooks(completes=True)
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


def measure(requests: int, rounds: int, steps: int) -> dict[str, float]:
    """
    Nanoseconds of a step, best round, with hooks, the same calls without them, and the bare loop; rounds alternate.
    """
    plain, hooked = Runner(requests), Runner(requests)
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


def grown_bytes(steps: int) -> int:
    """
    Bytes that Python holds more after `steps` healthy steps than after as many before.
    """
    runner = Runner(64)
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


def count_calls(steps: int) -> int:
    """
    System calls of this program when it takes `steps` hooked steps and exits, by strace.

    Raises:
        FileNotFoundError: strace is not installed (Debian package `strace`).

    """
    with tempfile.NamedTemporaryFile() as summary:
        command = ["strace", "-f", "-c", "-o", summary.name, sys.executable, __file__, "--steps-only", str(steps)]
        subprocess.run(command, check=True)
        last = Path(summary.name).read_text().strip().splitlines()[-1].split()
    return int(last[2] if "." in last[2] else last[3] if last[3].isdigit() else last[2])


def take_steps(steps: int) -> None:
    """
    Take hooked steps and nothing else, for strace to watch.
    """
    runner = Runner(64)
    output = schedule(runner)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        installation = install(runner, directory)
        for _ in range(steps):
            runner.execute_model(output)
            runner.sample_tokens(None)
        installation.uninstall()


def main() -> int:
    """
    Print the figures.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps-only", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps_only is not None:
        take_steps(arguments.steps_only)
        return 0
    figures = Figures("hotpath")
    for requests in (8, 64, 256):
        progress(f"hotpath: {requests} requests")
        found = measure(requests, arguments.rounds, max(8, 1600 // requests))
        ours = found["hooked"] - found["plain"]
        figures.report(
            f"ratio_{requests}", round(ours / found["bare"], 2), "<= 3",
            hooks_ns=round(ours), bare_ns=round(found["bare"]), calls_ns=round(found["plain"]),
        )  # fmt: skip
    few, many = 100, 5100
    progress("hotpath: system calls")
    calls = count_calls(many) - count_calls(few)
    # The interpreter itself differs by a few calls from run to run (memory maps); 5,000 steps would show.
    figures.report("system_calls_per_step", round(calls / (many - few), 4), "<= 0.01", calls=calls, steps=many - few)
    progress("hotpath: memory")
    figures.report("grown_bytes_per_step", round(grown_bytes(4000) / 4000, 3), "<= 0.1", steps=4000)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
