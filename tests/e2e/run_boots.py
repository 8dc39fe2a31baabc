"""
Stock vLLM of several releases, booted for a few requests, a JSON line for each figure: `run_boots.py [NAME ...]`.

Who each rank is, and what Rankscope's metrics say of the run, against what the run was asked and gave.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "lab"), str(Path(__file__).parents[1] / "bench")]
from figures import Figures, progress

from rankscope_exporter.contract import Guard
from rankscope_lab.boots import BOOTS, TOKENS, Boot, Booted, BootedRank, run
from rankscope_lab.v2.workload import scheduled_tokens


def report(figures: Figures, boot: Boot, booted: Booted) -> None:
    """
    The figures of one boot.
    """
    requests, ranks = booted.requests, booted.ranks
    figures.report("tokens", booted.tokens, f"= {len(requests) * TOKENS}", wrong=booted.wrong_tokens, vllm=boot.release)
    places = {rank.place for rank in ranks}
    figures.report(
        "identities", places == boot.places() and len(ranks) == len(places), "= true", places=sorted(places),
        engines=sorted({rank.identity["engine"] for rank in ranks}), start_method=boot.start_method,
    )  # fmt: skip
    figures.report("identity_details_wrong", len(wrong_details(boot, ranks)), "= 0", wrong=wrong_details(boot, ranks))
    figures.report("faults", sum(rank.faults for rank in ranks), "= 0")
    for replica in range(boot.replicas):
        group = [rank for rank in ranks if rank.place[0] == replica]
        suffix = f"_dp{replica}" if boot.replicas > 1 else ""
        report_group(figures, boot, group, suffix)
    asked = {"new": len(requests), "scheduled_tokens": scheduled_tokens(requests)}
    for field, wanted in asked.items():
        firsts = [rank for rank in ranks if rank.place[1:] == (0, 0)]
        figures.report(field, sum(int(rank.records[field].sum()) for rank in firsts), f"= {wanted}")


def report_group(figures: Figures, boot: Boot, ranks: list[BootedRank], suffix: str) -> None:
    """
    What the ranks of an engine did: the same steps, the same decisions, and metrics that say so.
    """
    steps = [len(rank.records) for rank in ranks]
    figures.report(f"steps{suffix}", min(steps, default=0), "> 0", per_rank=steps)
    figures.report(f"step_spread{suffix}", max(steps, default=0) - min(steps, default=0), "<= 1")
    common = min(steps, default=0)
    guards = [rank.records["guard"][:common] for rank in ranks]
    differing = sum(int((guard != guards[0]).sum()) for guard in guards)
    figures.report(f"guard_disagreements{suffix}", differing, "= 0")
    hashes = [rank.records["batch_hash"][:common] for rank in ranks]
    figures.report(f"batch_disagreements{suffix}", sum(int((of != hashes[0]).sum()) for of in hashes), "= 0")
    for rank in ranks:
        records, samples = rank.records, rank.samples
        decided = records["guard"] != Guard.NONE
        if boot.pipeline_ranks > 1:
            working = int((records["scheduled_tokens"] > 0).sum())
            figures.report(f"decisions_{name(rank)}", int(decided.sum()), f"= {working}")
        told = {
            "rankscope_steps_total": int(records["step"].max(initial=0)),
            "rankscope_guard_broadcasts_total": int((records["guard"] == Guard.BROADCAST).sum()),
            "rankscope_guard_skips_total": int((records["guard"] == Guard.SKIP).sum()),
            "rankscope_collectives_posted_total": int(records["posted"].sum()),
        }
        differing = {metric: samples.get(metric) for metric, value in told.items() if samples.get(metric) != value}
        figures.report(f"metrics_differing_{name(rank)}", len(differing), "= 0", metrics=differing, records=told)


def name(rank: BootedRank) -> str:
    """
    A rank in a figure's name.
    """
    dp, pp, tp = rank.place
    return f"dp{dp}_pp{pp}_tp{tp}"


def wrong_details(boot: Boot, ranks: Any) -> list[str]:
    """
    What an identity says that is not so.
    """
    wanted = {
        "runner": "V2" if boot.v2 else "V1",
        "pp_size": boot.pipeline_ranks,
        "tp_size": boot.tensor_ranks,
        "async_scheduling": True,
    }
    wrong = [
        f"{name(rank)} {field} {rank.identity[field]}"
        for rank in ranks
        for field, value in wanted.items()
        if rank.identity[field] != value
    ]
    versions = {rank.identity["vllm_version"].partition("+")[0] for rank in ranks}
    return [*wrong, *(f"vllm_version {version}" for version in versions - {boot.release})]


def main() -> int:
    """
    Boot what was asked for; 1 if a figure missed its goal or a boot failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {boot.name: boot for boot in BOOTS}
    parser.add_argument("boots", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all of them if none is named")
    names = parser.parse_args().boots or list(known)
    if unknown := [one for one in names if one not in known]:
        parser.error(f"no boot is called {', '.join(unknown)}; there are {', '.join(known)}")
    worst = 0
    for one in names:
        figures = Figures(f"boot-{one}")
        with tempfile.TemporaryDirectory(prefix="rankscope-boot-") as work:
            try:
                report(figures, known[one], run(known[one], Path(work), os.environ, progress))
            except Exception as error:  # noqa: BLE001
                figures.report("run", "failed", "= done", error=f"{type(error).__name__}: {error}"[-2000:])
        worst = max(worst, figures.exit_code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
