"""
A million steps of healthy traffic, with every legitimate oddity: whatever is found is a false alarm.

Made engines of both runners, two to eight stages deep, on one node or two, are watched by what the server watches with,
on simulated time. Each oddity is a figure of its own, so that one sees that it was there. `blind` is rightly said while
an exporter is out of reach, and has to be said then: `blind_unsaid` counts looks at which it was not.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("sim", "support", "bench")]
import figures
from sim_healthy import Outcome, run_healthy
from sim_oddities import Oddity

STEPS = 1_000_000
STEPS_EACH = 5_000
"""
Steps of one deployment, over up to three engines.
"""
SEED = 54260


def outcomes(processes: int, seed: int) -> Iterator[Outcome]:
    """
    One deployment after the other, without an end, as many at once as there are processes.
    """
    context = multiprocessing.get_context("spawn")
    seeds = itertools.count(seed)
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting: deque[Future[Outcome]] = deque()
        try:
            while True:
                while len(waiting) < 2 * processes:
                    waiting.append(pool.submit(run_healthy, next(seeds), STEPS_EACH))
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def main() -> int:
    """
    Watch, print figures; 1 if a goal was missed.
    """
    parser = argparse.ArgumentParser(description="False alarms in healthy traffic.")
    parser.add_argument("steps", nargs="?", type=int, default=STEPS, help=f"steps, summed over engines ({STEPS})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the first deployment ({SEED})")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="how many at once (one per processor)"
    )
    options = parser.parse_args()
    out, total, deployments = figures.Figures("false_alarms"), Outcome(), 0
    for outcome in outcomes(options.processes, options.seed):
        deployments += 1
        total.add(outcome)
        if deployments % 10 == 0:
            figures.progress(f"false_alarms: {total.steps} steps, {len(total.alarms)} false findings")
        if total.steps >= options.steps:
            break
    out.report("steps", total.steps, f">= {options.steps}", deployments=deployments, looks=total.looks)
    out.report("false_findings", len(total.alarms), "= 0", found=[asdict(alarm) for alarm in total.alarms[:50]])
    out.report("blind_unsaid", len(total.unsaid), "= 0", looks=[asdict(alarm) for alarm in total.unsaid[:10]])
    for oddity in Oddity:
        out.report(oddity.value, total.counts[oddity], "> 0")
    return out.exit_code


if __name__ == "__main__":
    sys.exit(main())
