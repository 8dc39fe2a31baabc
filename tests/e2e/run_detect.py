"""
Detection on real vLLM, a JSON line for each figure: `run_detect.py [baseline] [fixed] [plain] [v2] [--runs 10]`.

baseline: seeded engines without the fix, each until it wedges. Each wedge must be found at the step that the flight files
have, the alert about drift must come before the ranks part, and the news of that must reach server, Alertmanager (a real
one) and an open page within a second. fixed, plain, v2: engines with the fix on, without speculation, and of the V2
runner: nothing at all may be found.

One engine runs at a time: what is measured is how soon the news comes, and a second one that starts would delay it.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "support")]
from detect_plans import LOOSE, PACE_MS, SLOTS, BaselineRun, plan_baseline, plan_healthy
from detect_verdicts import BaselineVerdict, HealthyVerdict, report_baseline, report_healthy
from detect_watch import AlertWatch, PageWatch, ViewWatch
from evidence import RankEvidence, compare, read_ranks
from figures import Figures, progress
from prometheus import start_alertmanager
from stack import Observers, Stack
from v2_run import SETTINGS, options

from rankscope_lab.traffic import Phase, Traffic
from rankscope_lab.v2.launch import OfflineRun

PARTING_SECONDS = 90.0
"""
How long a baseline run may take until its ranks part.
"""
NEWS_SECONDS = 20.0
"""
How long the news of it, and that the engine is wedged, may take before they are given up.
"""
HEALTHY_SECONDS = 8.0
HEALTHY_ACCEPTANCES = (0.4, 0.8)
V2_METHOD = "ngram_gpu"
GUARD = "guard disagreement"


async def run_baseline(run: BaselineRun, alertmanager: str) -> BaselineVerdict:
    """
    One engine without the fix, until it has wedged and everybody has heard.
    """
    name = f"baseline-{run.number}"
    arguments = ("--alertmanager", alertmanager)
    engine: dict[str, Any] = {"slots": SLOTS, "pace_ms": PACE_MS, "acceptance": run.acceptance, "seed": run.plan.seed}
    async with Stack(name, server_arguments=arguments, **engine) as stack:
        page_of = await newest_engine(stack)
        alerts = AlertWatch(alertmanager, name)
        page = PageWatch(stack.server_url, name, page_of, (GUARD,))
        view = ViewWatch(stack.server_url, name, page_of)
        async with alerts, page, view:
            progress(f"{name}: acceptance {run.acceptance}, traffic until the ranks part")
            async with traffic(stack, run) as phases:
                parted = await until(lambda: parted_step(stack) is not None, PARTING_SECONDS)
                if parted:
                    await until(lambda: heard_all(alerts, page, view), NEWS_SECONDS)
            ranks = read_ranks(stack.flight_dir)
    parting = compare(ranks)
    step = parting.first_guard_disagreement_step
    decided = None if step is None else max(rank.unix(int(rank.at(step)["decide_ns"])) for rank in ranks)
    return BaselineVerdict(
        run.number,
        run.acceptance,
        step,
        decided,
        None if parting.first_drift_step is None else begun_unix(ranks[0], parting.first_drift_step),
        view.findings,
        view.findings.get(GUARD, {}).get("found_unix"),
        alerts.first_unix.get("RankscopeDrift"),
        alerts.first_unix.get("RankscopeGuardDisagreement"),
        page.first_unix.get(GUARD),
        phases.get(LOOSE),
        view.forecasts,
    )


def begun_unix(rank: RankEvidence, step: int) -> float:
    """
    When a rank began a step.
    """
    return rank.unix(int(rank.at(step)["begin_ns"]))


@contextlib.asynccontextmanager
async def traffic(stack: Stack, run: BaselineRun) -> AsyncIterator[dict[str, float]]:
    """
    The traffic of a run for the time of the block, and when each phase began; what clients still wait for then is
    withdrawn.
    """
    phases: dict[str, float] = {}

    def began(phase: Phase) -> None:
        phases[phase.name] = time.time()

    sending = asyncio.create_task(Traffic(stack.engine.url, run.plan, on_phase=began).run())
    try:
        yield phases
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


async def newest_engine(stack: Observers) -> str:
    """
    Id of the engine that the fleet page shows first.
    """
    fleet = await stack.get("/api/v1/fleet")
    engine: str = fleet["deployments"][0]["engines"][0]["engine"]
    return engine


def parted_step(stack: Stack) -> int | None:
    """
    The first guard disagreement in the flight files.
    """
    ranks = read_ranks(stack.flight_dir)
    return compare(ranks).first_guard_disagreement_step if len(ranks) > 1 else None


def heard_all(alerts: AlertWatch, page: PageWatch, view: ViewWatch) -> bool:
    """
    Whether there is nothing left to wait for.
    """
    told = {"RankscopeDrift", "RankscopeGuardDisagreement", "RankscopeWedged"} <= alerts.first_unix.keys()
    return told and GUARD in page.first_unix and {GUARD, "wedged"} <= view.findings.keys()


async def until(holds: Callable[[], bool], seconds: float) -> bool:
    """
    Whether it came to hold within so many seconds.
    """
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.1)
    return True


async def baseline(figures: Figures, alertmanager: str, runs: int) -> None:
    """
    All runs that part.
    """
    verdicts, failures = [], {}
    for number in range(runs):
        try:
            one = await run_baseline(plan_baseline(number, runs), alertmanager)
        except Exception as error:  # noqa: BLE001  one run that fails takes no other with it
            failures[f"baseline-{number}"] = f"{type(error).__name__}: {error}"[:1000]
            continue
        verdicts.append(one)
        progress(
            f"baseline-{number}: parted at step {one.parted_step}, {one.drifting_seconds} s after the first drift, lead {one.lead_seconds} s, found after {one.delay(one.finding_unix)} s, "
            f"Alertmanager after {one.delay(one.guard_alert_unix)} s, page after {one.delay(one.page_unix)} s"
        )
    figures.report("runs_failed", len(failures), "= 0", errors=failures)
    report_baseline(figures, verdicts)


async def healthy(name: str, numbers: list[int], alertmanager: str, **engine: Any) -> list[HealthyVerdict]:
    """
    Several runs of traffic on one engine that nothing is wrong with.
    """
    verdicts = []
    async with Stack(
        name, slots=SLOTS, pace_ms=15.0, server_arguments=("--alertmanager", alertmanager), **engine
    ) as stack:
        view = ViewWatch(stack.server_url, name, await newest_engine(stack))
        alerts = AlertWatch(alertmanager, name)
        async with view, alerts:
            for number in numbers:
                before = last_step(stack)
                total = (await Traffic(stack.engine.url, plan_healthy(number, HEALTHY_SECONDS)).run()).total
                await asyncio.sleep(2.0)
                steps = last_step(stack) - before
                progress(f"{name}: run {number}, {steps} steps, {total.completed} of {total.requests} requests")
                verdicts.append(_healthy(f"{name} run {number}", steps, view, alerts))
    return verdicts


def _healthy(name: str, steps: int, view: ViewWatch, alerts: AlertWatch) -> HealthyVerdict:
    found = [f"{kind}: {finding['sentence']}" for kind, finding in view.findings.items()]
    fired = sorted(alerts.first_unix)
    view.findings.clear()
    alerts.first_unix.clear()
    return HealthyVerdict(name, steps, found, fired)


def last_step(stack: Observers) -> int:
    """
    The newest step in the flight files.
    """
    return max((int(rank.records["step"].max(initial=0)) for rank in read_ranks(stack.flight_dir)), default=0)


async def fixed(figures: Figures, alertmanager: str, runs: int) -> None:
    """
    Runs with the fix on, on engines of different acceptance.
    """
    verdicts = []
    for index, acceptance in enumerate(HEALTHY_ACCEPTANCES[: max(1, min(runs, len(HEALTHY_ACCEPTANCES)))]):
        numbers = list(range(index, runs, len(HEALTHY_ACCEPTANCES)))
        name = f"fixed-{index}"
        verdicts += await healthy(name, numbers, alertmanager, trim_fix="on", acceptance=acceptance, seed=index)
    report_healthy(figures, "fixed", verdicts)


async def plain(figures: Figures, alertmanager: str, runs: int) -> None:
    """
    Runs without speculation.
    """
    report_healthy(figures, "plain", await healthy("plain", list(range(runs)), alertmanager, speculation=False))


async def v2(figures: Figures, alertmanager: str, runs: int) -> None:
    """
    One run of the V2 runner, from its first step to its end.
    """
    del runs
    name = "v2"
    settings = options(Path("unused"), V2_METHOD, settings=SETTINGS, enabled=False).environment
    async with Observers(name, python=settings.python, server_arguments=("--alertmanager", alertmanager)) as observers:
        launch = options(
            observers.work,
            V2_METHOD,
            settings=SETTINGS,
            RANKSCOPE_FLIGHT_DIR=str(observers.flight_dir),
        )
        with OfflineRun(launch, observers.work / "vllm.log") as run:
            progress(f"{name}: starting vLLM offline")
            facts = asyncio.create_task(asyncio.to_thread(run.facts))
            fleet = "/api/v1/fleet"
            await observers.until(
                lambda f: f["deployments"][0]["engines"], fleet, "the V2 engine on the fleet page", 300.0
            )
            view = ViewWatch(observers.server_url, name, await newest_engine(observers))
            alerts = AlertWatch(alertmanager, name)
            async with view, alerts:
                told = await facts
                await asyncio.sleep(2.0)
                steps = last_step(observers)
                progress(f"{name}: {steps} steps, {told['completed']} of {told['requests']} requests")
                verdict = _healthy(name, steps, view, alerts)
    report_healthy(figures, "v2", [verdict])


PARTS: dict[str, Callable[[Figures, str, int], Awaitable[None]]] = {
    "baseline": baseline,
    "fixed": fixed,
    "plain": plain,
    "v2": v2,
}


def main() -> int:
    """
    Do the parts that were asked for; 1 if a figure missed its goal or a part failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--runs", type=int, default=10, help="seeded runs of each part (10)")
    asked = parser.parse_args()
    unknown = [part for part in asked.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    worst = 0
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-e2e-alertmanager-") as work,
        start_alertmanager(Path(work)) as url,
    ):
        for part in asked.parts or PARTS:
            figures = Figures(f"detect-{part}")
            began = time.monotonic()
            try:
                asyncio.run(PARTS[part](figures, url, asked.runs))
            except Exception as error:  # noqa: BLE001
                figures.report("run", "failed", "= done", error=f"{type(error).__name__}: {error}"[:2000])
            progress(f"{figures.run}: {time.monotonic() - began:.0f} s")
            worst = max(worst, figures.exit_code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
