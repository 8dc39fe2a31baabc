"""
Each kind of fault, put into healthy traffic at random many times: whether it is found, at the right step, with the right
ranks, under no wrong name, and how long after its evidence reached the exporter.

Faults are put into made engines on simulated time; exporters are polled every 0.25 s.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("sim", "support", "bench")]
import figures
from sim_faults import KINDS, FaultKind
from sim_inject import Injection

from rankscope_server.domain.findings import STICKY
from rankscope_server.domain.model import FindingKind

TIMES = 200
SEED = 54260
DELAY_GOAL = "<= 1.0"
"""
Seconds to the finding, of disagreements. The other kinds wait by design, to be sure that something lasts.
"""


def inject(number: int, seed: int) -> Injection:
    """
    Put in the fault of a kind, by its place in `KINDS`, and watch.
    """
    return Injection(seed, KINDS[number]).run()


def injections(pool: ProcessPoolExecutor, number: int, times: int, seed: int) -> Iterator[Injection]:
    """
    So many faults of a kind; engines with no step that suits it are passed over.
    """
    seeds, found = itertools.count(seed), 0
    while found < times:
        batch = list(itertools.islice(seeds, times - found))
        for one in pool.map(inject, itertools.repeat(number), batch, chunksize=4):
            if one.fault is not None:
                found += 1
                yield one


def report(out: figures.Figures, kind: FaultKind, done: list[Injection], times: int) -> None:
    """
    Print the figures of a kind.
    """
    variants = Counter(one.fault.variant for one in done if one.fault is not None)
    missed = [one.seed for one in done if one.found_at is None]
    goal = f"= {times}"
    out.report(f"found_{kind.name}", len(done) - len(missed), goal, missed=missed, variants=dict(variants))
    other_step = [
        {"seed": one.seed, "named": one.step, "put_in": one.fault and one.fault.step}
        for one in done
        if not one.right_step
    ]
    if kind.kind is not FindingKind.BLIND:  # it has no step
        out.report(f"right_step_{kind.name}", times - len(other_step), goal, wrong=other_step[:20])
    other_ranks = [one.seed for one in done if not one.right_ranks]
    out.report(f"right_ranks_{kind.name}", times - len(other_ranks), goal, wrong=other_ranks[:20])
    wrong = [{"seed": one.seed, "said": one.wrong} for one in done if one.wrong]
    out.report(f"wrong_names_{kind.name}", len(wrong), "= 0", said=wrong[:20])
    if kind.kind is FindingKind.STALLED:
        out.report("frozen_equal_called_divergence", sum(one.diverged for one in done), "= 0")
    delays = [one.delay for one in done if one.delay is not None]
    goal = DELAY_GOAL if kind.kind in STICKY else ""
    out.report(f"delay_seconds_{kind.name}", round(statistics.median(delays), 3) if delays else None, goal)
    out.report(f"delay_worst_seconds_{kind.name}", round(max(delays), 3) if delays else None, goal)


def main() -> int:
    """
    Put them in, print figures; 1 if a goal was missed.
    """
    parser = argparse.ArgumentParser(description="Faults that are to be found.")
    parser.add_argument("--times", type=int, default=TIMES, help=f"of each kind ({TIMES})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the first one of each kind ({SEED})")
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], help="this kind only")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="how many at once (one per processor)"
    )
    options = parser.parse_args()
    out = figures.Figures("faults")
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, kind in enumerate(KINDS):
            if options.kind in (None, kind.name):
                figures.progress(f"faults: {kind.kind.value}, {options.times} times")
                done = list(injections(pool, number, options.times, options.seed))
                report(out, kind, done, options.times)
    return out.exit_code


if __name__ == "__main__":
    sys.exit(main())
