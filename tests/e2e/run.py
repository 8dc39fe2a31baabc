"""
The main job on real vLLM, a JSON line for each figure: `run.py baseline canary mid-drift`.

baseline: without the fix the ranks drift apart, output goes wrong, the guards part, the engine wedges, and is still
readable then; alerts of the server and of Prometheus reach Alertmanager. canary: the same traffic with the fix on from
the start. mid-drift: the fix turned on through the server while drift grows, and off again.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("e2e", "bench", "support")]
from evidence import Comparison, RankEvidence, compare, read_ranks
from figures import Figures, progress
from prometheus import alerts_at, start_alertmanager, start_prometheus
from stack import Stack

from rankscope_lab.story import ANCHORS, LONG, SHORT
from rankscope_lab.traffic import Phase, Plan, Result, Stream, Traffic

SEED = 54260
MIXED = Stream("mixed", lengths=(20, 119), rate=20.0)
ACCEPTANCE = 0.97
TIMEOUT_SECONDS = 12.0
RULES = TESTS.parent / "deploy" / "prometheus" / "rankscope.rules.yml"
ALERTS = ("RankscopeGuardDisagreement", "RankscopeWedged")
WITH_THEM = ("RankscopeDrift", "RankscopeMaskDisagreement", "RankscopeForecast")
"""
What may be told beside these, as it is true on the way to a wedge: Prometheus sees drift only if it lasts some scrapes.
"""


async def send(stack: Stack, *streams: Stream, seconds: float) -> Result:
    """
    Seeded traffic, and what came of it.
    """
    plan = Plan(
        (Phase("traffic", seconds, streams),),
        seed=SEED,
        concurrency=stack.engine.options.slots,
        timeout=TIMEOUT_SECONDS,
    )
    return await Traffic(stack.engine.url, plan).run()


async def run_baseline(figures: Figures) -> None:
    """
    Drift, wrong output, guard disagreement, wedge; then what is left of the first rank after it was killed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-e2e-") as directory,
        start_alertmanager(Path(directory)) as alerts,
    ):
        async with Stack(
            "baseline", acceptance=ACCEPTANCE, seed=SEED, server_arguments=("--alertmanager", alerts)
        ) as stack:
            with start_prometheus({"baseline": stack.exporter_url}, alerts, RULES, Path(directory)):
                ranks = await watch_a_wedge(stack, figures)
                await report_alerts(figures, alerts)
            await kill_the_first_rank(stack, ranks, figures)


async def watch_a_wedge(stack: Stack, figures: Figures) -> list[RankEvidence]:
    """
    Traffic until nothing moves any more, and what the server says of it; what the flight files say.
    """
    progress("baseline: 15 s of traffic")
    total = (await send(stack, MIXED, seconds=15)).total
    health = await stack.http.get(f"{stack.engine.url}/health")
    ranks = read_ranks(stack.flight_dir)
    found = compare(ranks)
    view = await stack.view()
    report_order(figures, found)
    figures.report("requests", total.requests, "> 0")
    figures.report("completed", total.completed, f"< {total.requests}")
    figures.report("wrong_tokens", total.wrong_tokens, "> 0", tokens=total.tokens)
    figures.report("health_while_wedged", health.status_code, "= 200", state=view["state"], headline=view["headline"])
    figures.report("state", str(view["state"]).lower(), "= wedged")
    report_detection(figures, ranks, found, view)
    return ranks


async def report_alerts(figures: Figures, alertmanager: str) -> None:
    """
    What Alertmanager hears of it: from the server, and from Prometheus, which knows the exporter's metrics only.
    """
    for source, told in (("server", "rankscope-server"), ("prometheus", None)):

        def names(told: str | None = told) -> list[str]:
            held = [labels for labels in alerts_at(alertmanager) if labels.get("source") == told]
            return list(dict.fromkeys(labels["alertname"] for labels in held))

        def arrived(names: Callable[[], list[str]] = names) -> bool:
            return set(ALERTS) <= set(names())

        await wait_for(arrived, f"the alerts of the {source}", names)
        said = names()
        figures.report(f"alerts_of_{source}", sum(name in said for name in ALERTS), f"= {len(ALERTS)}", said=said)
        figures.report(f"false_alerts_of_{source}", len(set(said) - {*ALERTS, *WITH_THEM}), "= 0")


async def kill_the_first_rank(stack: Stack, ranks: list[RankEvidence], figures: Figures) -> None:
    """
    What is left of a rank that was killed: its last records, at the exporter and on the page.
    """
    progress("baseline: kill -9 of the first rank")
    os.kill(ranks[0].pid, signal.SIGKILL)
    engine = ranks[0].engine
    path = f"/api/v1/deployments/baseline/engines/{engine}"
    view = await stack.until(
        lambda v: any(r["life"] == "gone" for r in v["ranks"]), path, "the killed rank on the page"
    )
    answer = (await stack.http.get(f"{stack.exporter_url}/v1/steps")).content
    served = decode_last(answer)
    kept = {rank.key: int(rank.records[-1]["step"]) for rank in ranks}
    figures.report(
        "ranks_served_after_kill",
        sum(served.get(key) == step for key, step in kept.items()),
        "= 2",
        last_steps=served,
    )
    did = {rank["label"]: rank["last_did"] for rank in view["ranks"]}
    figures.report(
        "ranks_told_on_page_after_kill",
        sum(bool(text) for text in did.values()),
        "= 2",
        last_did=did,
        state=view["state"],
    )


def decode_last(answer: bytes) -> dict[str, int]:
    """
    The last step of each rank in a `/v1/steps` answer.
    """
    from rankscope_exporter.contract import StepsFrame

    frame = StepsFrame.decode(answer)
    return {
        rank.key: int(records["step"][-1])
        for rank, records in zip(frame.header.ranks, frame.records, strict=True)
        if len(records)
    }


def report_order(figures: Figures, found: Comparison) -> None:
    """
    Drift comes first, then masks disagree, then guards.
    """
    drift, mask, guard = found.first_drift_step, found.first_mask_disagreement_step, found.first_guard_disagreement_step
    figures.report("first_drift_step", drift, "> 0")
    figures.report("first_mask_disagreement_step", mask, f"> {drift or 0}")
    figures.report(
        "first_guard_disagreement_step", guard, f"> {mask or 0}", drift_max=found.drift_max, steps=found.steps
    )
    figures.report("batches_equal", found.batches_equal, "= true")


def report_detection(figures: Figures, ranks: list[Any], found: Comparison, view: Any) -> None:
    """
    Seconds from the second rank's decision to the finding on the server, by the node's clock.
    """
    step = found.first_guard_disagreement_step
    findings = {str(f["kind"]): f for f in view["findings"]}
    finding = findings.get("guard disagreement")
    if step is None or finding is None:
        figures.report("detect_seconds", None, "<= 1", findings=sorted(findings))
        return
    decided = max(rank.unix(int(rank.at(step)["decide_ns"])) for rank in ranks)
    figures.report("detected_step", finding["step"], f"= {step}", sentence=finding["sentence"])
    figures.report("detect_seconds", round(finding["found_unix"] - decided, 3), "<= 1")


async def run_canary(figures: Figures) -> None:
    """
    The same traffic, with the fix on before it.
    """
    async with Stack("canary", role="canary", trim_fix="on", acceptance=ACCEPTANCE, seed=SEED) as stack:
        progress("canary: 15 s of traffic")
        total = (await send(stack, MIXED, seconds=15)).total
        ranks = read_ranks(stack.flight_dir)
        found = compare(ranks)
        figures.report("requests", total.requests, "> 0")
        figures.report("completed", total.completed, f"= {total.requests}")
        figures.report("wrong_tokens", total.wrong_tokens, "= 0", tokens=total.tokens)
        figures.report("drift_max", found.drift_max, "= 0", steps=found.steps)
        figures.report("skip_disagreements", found.guard_disagreements, "= 0")
        trimmed = int(ranks[0].records["trimmed_total"].max(initial=0))
        figures.report("trimmed_tokens", trimmed, "> 0", rank="pp0")
        view = await stack.view()
        figures.report(
            "findings", len(view["findings"]), "= 0", state=view["state"], kinds=[f["kind"] for f in view["findings"]]
        )


async def run_mid_drift(figures: Figures) -> None:
    """
    The fix turned on through the server while drift grows, before the guards part; then off again.
    """
    async with Stack("canary", role="canary", acceptance=0.9, pace_ms=15.0, seed=SEED) as stack:
        progress("mid-drift: traffic that drifts, the guard held open")
        traffic = asyncio.create_task(send(stack, ANCHORS, LONG, SHORT, seconds=600))
        before = await wait_for(
            lambda: drift_of_first_rank(stack) >= 20, "drift of 20 on pp0", lambda: drift_of_first_rank(stack)
        )
        parted = compare(read_ranks(stack.flight_dir)).first_guard_disagreement_step
        outcome = await stack.toggle(desired=True)
        progress(f"mid-drift: drift {before}, fix on: {outcome['reason']}")
        await wait_for(lambda: all(r.acted_step for r in read_ranks(stack.flight_dir)), "every rank has acted")
        acted = [rank.acted_step for rank in read_ranks(stack.flight_dir)]
        await wait_for(
            lambda: all(int(r.records[-1]["step"]) > max(acted) for r in read_ranks(stack.flight_dir)),
            "a step after that",
        )
        ranks = read_ranks(stack.flight_dir)
        drift = {f"pp{rank.pp_rank}": int(rank.at(step)["drift_max"]) for rank, step in zip(ranks, acted, strict=True)}
        figures.report("drift_before", before, "> 0", guards_parted_at=parted)
        figures.report(
            "applied_step_spread",
            max(acted) - min(acted),
            "= 0",
            acted_steps=acted,
            effective_step=outcome["effective_step"],
        )
        figures.report("drift_max_next_step", max(drift.values()), "= 0", **drift)
        traffic.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await traffic

        progress("mid-drift: traffic with the fix on")
        total = (await send(stack, MIXED, seconds=10)).total
        later = compare([only_after(rank, max(acted)) for rank in read_ranks(stack.flight_dir)])
        figures.report("requests_after", total.requests, "> 0")
        figures.report("completed_after", total.completed, f"= {total.requests}")
        figures.report("wrong_tokens_after", total.wrong_tokens, "= 0", tokens=total.tokens)
        figures.report("drift_max_after", later.drift_max, "= 0", steps=later.steps)
        figures.report("skip_disagreements_after", later.guard_disagreements, "= 0")
        view = await stack.view()
        progress_of = view["fix"]["progress"]
        figures.report(
            "acknowledged", progress_of["acknowledged"], f"= {progress_of['ranks']}", per_rank=progress_of["per_rank"]
        )

        progress("mid-drift: fix off again")
        traffic = asyncio.create_task(send(stack, ANCHORS, LONG, SHORT, seconds=600))
        outcome = await stack.toggle(desired=False)
        drifted = await wait_for(
            lambda: drift_of_first_rank(stack) > 0, "drift on pp0", lambda: drift_of_first_rank(stack)
        )
        figures.report("drift_after_off", drifted, "> 0", reason=outcome["reason"])
        audit = await stack.get("/api/v1/audit")
        figures.report(
            "audit_rows",
            len([row for row in audit if row["actor"] == "local"]),
            ">= 2",
            rows=[f"{r['action']}: {r['outcome']}" for r in audit],
        )
        traffic.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await traffic


def drift_of_first_rank(stack: Stack) -> int:
    """
    The largest drift in the last measured step of pp0.
    """
    records = read_ranks(stack.flight_dir)[0].records
    measured = records[records["lengths"] > 0]
    return int(measured[-1]["drift_max"]) if len(measured) else 0


def only_after(rank: Any, step: int) -> Any:
    """
    A rank's evidence without the steps up to `step`.
    """
    import dataclasses

    return dataclasses.replace(rank, records=rank.records[rank.records["step"] > step])


async def wait_for(
    holds: Callable[[], bool], what: str, value: Callable[[], Any] = lambda: None, seconds: float = 90.0
) -> Any:
    """
    `value()` once `holds()`.

    Raises:
        TimeoutError: it did not within `seconds`.

    """
    try:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.05)
    except TimeoutError:
        msg = f"{what}: not within {seconds:.0f} s, {value()}"
        raise TimeoutError(msg) from None
    return value()


RUNS: dict[str, Callable[[Figures], Awaitable[None]]] = {
    "baseline": run_baseline,
    "canary": run_canary,
    "mid-drift": run_mid_drift,
}


def main() -> int:
    """
    Do the runs that were asked for; 1 if a figure missed its goal or a run failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", choices=list(RUNS))
    worst = 0
    for name in parser.parse_args().runs:
        figures = Figures(f"e2e-{name}")
        try:
            asyncio.run(RUNS[name](figures))
        except TimeoutError as error:
            figures.report("run", None, "= done", error=str(error))
        worst = max(worst, figures.exit_code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
