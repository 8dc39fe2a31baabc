"""
How often the forecast of the wedge holds, over many simulated engines of all kinds; and what a forecast costs.

Each engine runs until its ranks part, or for so long that they do not. Forecasts are asked for at moments so many steps
after its drift began, drawn without regard to how long it lasts: moments drawn from the time until the ranks part would
know of it, and no forecast could agree with them. Seeds from `--first-seed` on are those of the run; `--calibrate` takes others, which is
what the forecast may be tuned on.
"""

import argparse
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "support")]
import numpy as np
from drifting_engine import Run, Workload, run_engine
from figures import Figures, progress
from made_ranks import made_engine, made_report

from rankscope_exporter.contract import MitigationState
from rankscope_server.domain.clock import Moment, NodeClock
from rankscope_server.domain.facts import EngineFacts, RankFacts, rank_labels
from rankscope_server.domain.forecast import assess_forecast
from rankscope_server.domain.history import StepHistory
from rankscope_server.domain.model import RankId
from rankscope_server.domain.outlook import Forecast, Outlook

FIRST_SEED, CALIBRATION_SEED = 2_000_000, 1
ENGINES, SAMPLES = 300, 6

AFTER_SECONDS = 330.0
"""
How long an engine is followed at least, if its ranks do not part.
"""
SOON_SECONDS = 300.0
"""
Where it was not in sight, it should not come before this.
"""
MOST_STEPS = 9000
"""
Steps that an engine is followed at most.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """
    A forecast, and what came: seconds until the ranks parted (None: they did not), and for how long that was followed.
    """

    workload: Workload
    forecast: Forecast
    came: float | None
    followed: float
    step: int


def draw_workload(seed: int) -> Workload:
    """
    An engine of some kind: good and bad drafts, traffic regular or not, so sparse or dense that from a third of a request
    to a dozen is unmasked on average; in every fourth engine a dozen to three dozen. Where slots are too few for it,
    requests wait.
    """
    chance = np.random.default_rng(seed)
    draft_tokens = int(chance.integers(1, 6))
    acceptance = float(chance.uniform(0.3, 0.95))
    shortest = int(chance.integers(10, 60))
    step_seconds = float(np.exp(chance.uniform(np.log(0.02), np.log(0.12))))
    rejected = draft_tokens - sum(acceptance**n for n in range(1, draft_tokens + 1))
    turns_unmasked = 3 + (draft_tokens + 1) / rejected
    dense = chance.random() < 0.25
    unmasked = float(np.exp(chance.uniform(np.log(12.0 if dense else 0.3), np.log(36.0 if dense else 12.0))))
    return Workload(
        seed=seed,
        draft_tokens=draft_tokens,
        acceptance=acceptance,
        acceptance_spread=float(chance.choice([0.0, 0.05, 0.15])),
        acceptance_masked=None if chance.random() < 0.5 else 0.0,
        arrivals=unmasked / turns_unmasked / step_seconds,
        pattern=str(chance.choice(["poisson", "regular", "bursts"])),
        slots=128 if dense else int(np.exp(chance.uniform(np.log(4), np.log(64)))),
        output_tokens=(shortest, shortest + int(chance.integers(20, 200))),
        long_prompts=float(chance.choice([0.0, 0.05, 0.2])),
        step_seconds=step_seconds,
    )


def facts_at(run: Run, workload: Workload, index: int, pp_size: int = 2) -> tuple[EngineFacts, Moment]:
    """
    What the server knows once the record at `index` has come: all ranks but the last are alike.
    """
    now = Moment(1_700_000_000.0, 1000.0)
    ranks = []
    ids = [RankId(0, rank, 0) for rank in range(pp_size)]
    clock = NodeClock(int(run.first[index]["end_ns"]), now.unix, now.monotonic)
    for rank, label in zip(ids, rank_labels(ids), strict=True):
        records = run.last if rank is ids[-1] else run.first
        history = StepHistory(1024)
        history.absorb(records[max(0, index - 1000) : index + 1])
        trim = MitigationState.APPLIED if workload.fix else MitigationState.AVAILABLE
        report = made_report(rank.pp_rank, pp_size=pp_size, spec_tokens=workload.draft_tokens, trim=trim)
        ranks.append(RankFacts(rank, label, report, history, clock, "http://a:9610", 0.0, 0.0, None, now.monotonic))
    return made_engine(*ranks, now=now), now


def measure_cost(rounds: int = 200) -> tuple[float, float]:
    """
    Milliseconds of a forecast for an engine of eight pipeline ranks, step by step: the median, and what it is when the
    machine is left alone (the best tenth).
    """
    workload = Workload(seed=3, acceptance=0.8, arrivals=40.0, pattern="regular", slots=64)
    run = run_engine(workload, 700 + rounds)
    costs = []
    for index in range(700, min(700 + rounds, len(run.first))):
        facts, now = facts_at(run, workload, index, pp_size=8)
        started = time.thread_time()
        assess_forecast(facts, now)
        costs.append(1e3 * (time.thread_time() - started))
    return statistics.median(costs), sorted(costs)[len(costs) // 10]


def sample_engine(seed: int) -> list[Sample]:
    """
    Forecasts of one engine at some moments of its drift.
    """
    workload = draw_workload(seed)
    run = run_engine(workload, min(MOST_STEPS, int(2 * AFTER_SECONDS / workload.step_seconds)))
    drifting = run.drifting_from
    if drifting is None:
        return []
    begin = run.first["begin_ns"].astype(np.int64)
    end = len(begin) - 1 if run.wedged else int(np.searchsorted(begin, begin[-1] - AFTER_SECONDS * 1e9))
    if end <= drifting:
        return []
    samples = []
    for index in moments(seed, drifting, end):
        facts, now = facts_at(run, workload, index)
        forecast = assess_forecast(facts, now)
        followed = float(begin[-1] - begin[index]) / 1e9
        samples.append(Sample(workload, forecast, followed if run.wedged else None, followed, index))
    return samples


def moments(seed: int, drifting: int, end: int) -> list[int]:
    """
    Indices of records at which forecasts are asked for, as many early ones as late ones.
    """
    chance = np.random.default_rng((seed, 1))
    after = np.exp(chance.uniform(0.0, np.log(MOST_STEPS), SAMPLES)).astype(int)
    return sorted({drifting + int(steps) for steps in after if drifting + steps < end})


def report(figures: Figures, samples: list[Sample]) -> None:
    """
    The figures over all samples. An interval that reaches beyond what was followed has neither held nor failed.
    """
    judged = Counter(_verdict(sample) for sample in samples)
    known = judged["held"] + judged["too late"] + judged["too early"]
    figures.report("coverage", _share(judged["held"], known), ">= 0.7", nominal=0.8, forecasts=known)
    figures.report("too_late", _share(judged["too late"], known), "<= 0.15")
    figures.report("too_early", _share(judged["too early"], known))
    seen = [interval for sample in samples if (interval := _interval(sample.forecast)) is not None]
    widths = [latest / max(earliest, 0.05) for earliest, latest in seen]
    figures.report("median_width_ratio", round(statistics.median(widths), 1) if widths else None)
    calm = [sample for sample in samples if sample.forecast.outlook is Outlook.NOT_IN_SIGHT]
    right = sum(sample.came is None or sample.came > SOON_SECONDS for sample in calm)
    figures.report("not_in_sight_right", _share(right, len(calm)), ">= 0.95", forecasts=len(calm))
    soon = Counter(_came_soon(sample) for sample in samples)
    never = _share(soon[False], soon[False] + soon[True])
    figures.report("in_sight_never", never, "<= 0.1", forecasts=soon[False] + soon[True])
    unknown = Counter(_kind(s.forecast) for s in samples if s.forecast.outlook is Outlook.UNKNOWN)
    figures.report(
        "unknown_share", _share(unknown.total(), len(samples)), forecasts=len(samples), reasons=dict(unknown)
    )


def _kind(forecast: Forecast) -> str:
    """
    A reason without its figures.
    """
    return re.sub(r"\d+", "N", forecast.reason.partition(":")[0])


def _interval(forecast: Forecast) -> tuple[float, float] | None:
    if forecast.earliest_seconds is None or forecast.latest_seconds is None:
        return None
    return forecast.earliest_seconds, forecast.latest_seconds


def _verdict(sample: Sample) -> str:
    """
    `held`, `too late` (it came before the interval), `too early`, or empty where that is not known.
    """
    interval = _interval(sample.forecast)
    if interval is None:
        return ""
    if sample.came is None:
        return "too early" if sample.followed > interval[1] else ""
    return "too late" if sample.came < interval[0] else "too early" if sample.came > interval[1] else "held"


def _came_soon(sample: Sample) -> bool | None:
    """
    Whether what was to come within ten minutes came within three times what was said; None if it was not to, or not known.
    """
    interval = _interval(sample.forecast)
    if interval is None or interval[1] > 2 * SOON_SECONDS:
        return None
    if sample.came is None:
        return False if sample.followed > 3 * interval[1] else None
    return sample.came <= 3 * interval[1]


def _told(sample: Sample) -> str:
    engine, forecast = sample.workload, sample.forecast
    interval = ""
    if forecast.earliest_seconds is not None and forecast.latest_seconds is not None:
        interval = f" {forecast.earliest_seconds:.2f} to {forecast.latest_seconds:.1f} s"
    came = "nothing came" if sample.came is None else f"came after {sample.came:.2f} s"
    return (
        f"{engine.seed}: k {engine.draft_tokens}, acceptance {engine.acceptance:.2f}, {engine.pattern}, {engine.slots} slots, "
        f"step {sample.step}: {forecast.outlook.value}{interval}; {came} in {sample.followed:.0f} s; {forecast.reason}"
    )


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def main() -> int:
    """
    Run the engines and print the figures; 1 if one missed its goal.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=ENGINES)
    parser.add_argument("--calibrate", action="store_true", help="other seeds, to tune the forecast on")
    parser.add_argument("--show", action="store_true", help="a line to standard error for each forecast")
    asked = parser.parse_args()
    figures, samples = Figures("forecast"), []
    first = CALIBRATION_SEED if asked.calibrate else FIRST_SEED
    kinds: Counter[str] = Counter()
    for number in range(asked.engines):
        some = sample_engine(first + number)
        kinds["parted at once" if not some else "held together" if some[0].came is None else "parted"] += 1
        samples += some
        if asked.show:
            for sample in some:
                progress(_told(sample))
        elif number % 25 == 24:
            progress(f"forecast: {number + 1} of {asked.engines} engines")
    figures.report("engines", asked.engines, "> 0", **kinds)
    report(figures, samples)
    median, best = measure_cost()
    figures.report("milliseconds", round(best, 2), "<= 2", median=round(median, 2), ranks=8)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
