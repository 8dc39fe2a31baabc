"""
The V2 model runner of real vLLM, a JSON line for each figure: `run_v2.py none ngram_gpu eagle3 fault`.

A method's name: seeded requests with aborts and preemption, with Rankscope and without. The ranks must have decided alike,
the flight files must say step by step what the lab's independent trace of the same run says, and the tokens must be
the same without Rankscope. fault: vLLM without async scheduling, with speculation: a rank fails and its peer hangs.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "bench")]
from agreement import assess_agreement, compare_ranks, widths_on_the_wire
from evidence import RankEvidence
from figures import Figures, progress
from v2_run import DRAFT_TOKENS, METHODS, SETTINGS, V2Run, run_once


def run_method(figures: Figures, method: str) -> None:
    """
    One run with Rankscope and the trace, one without either.
    """
    with tempfile.TemporaryDirectory(prefix="rankscope-e2e-v2-") as work:
        on = run_once(Path(work) / "on", method, settings=SETTINGS)
        report_run(figures, method, on)
        off = run_once(Path(work) / "off", method, settings=SETTINGS, enabled=False)
    same = on.facts["digest"] == off.facts["digest"]
    figures.report(
        "tokens_equal_without_rankscope", same, "= true", tokens=on.facts["tokens"], digest=off.facts["digest"]
    )


def report_run(figures: Figures, method: str, run: V2Run) -> None:
    """
    What a run did, and whether ranks, flight files and trace agree.
    """
    facts, ranks, trace = run.facts, run.ranks, run.trace
    figures.report("async_scheduling", facts["async_scheduling"], "= true", vllm=facts["vllm"])
    figures.report("requests", facts["requests"], f"= {SETTINGS.requests}")
    figures.report("completed", facts["completed"], f"= {facts['requests'] - facts['aborted']}", tokens=facts["tokens"])
    figures.report("wrong_tokens", facts["wrong_tokens"], "= 0", accepted_drafts=facts["accepted_drafts"])
    figures.report("aborts_seen", facts["aborted"], "> 0")
    preempted = sum(len(line["preempted"]) for line in trace[0])
    figures.report("preemptions", preempted, "> 0", vllm_counts=facts["preemptions"])
    parting = compare_ranks(ranks[0].records, ranks[-1].records)
    steps = [len(rank.records) for rank in ranks]
    figures.report("steps", parting.steps, f"= {max(steps)}", per_rank=steps, traced=[len(trace[n]) for n in trace])
    figures.report("skips", int(ranks[0].records["skips_total"].max()), "> 0", mixed_masks=mixed_masks(ranks[0]))
    figures.report("guard_disagreements", parting.guards, "= 0")
    figures.report("mask_disagreements", parting.masks, "= 0")
    figures.report("width_disagreements", parting.widths, "= 0")
    figures.report(
        "collective_disagreements", parting.collectives, "= 0", posted=int(ranks[0].records["posted_total"].max())
    )
    figures.report("batch_disagreements", parting.batches, "= 0")
    width = DRAFT_TOKENS + 1 if method != "none" else 1
    on_wire = set().union(*(widths_on_the_wire(lines) for lines in trace.values()))
    figures.report("width", int(ranks[0].records["width"].max()), f"= {width}", on_the_wire=sorted(on_wire))
    figures.report("queue_depth", int(ranks[0].records["queue_depth"].max()), f"= {len(ranks)}")
    dropped = int(ranks[0].records["dropped_total"].max())
    figures.report("rows_dropped", dropped, f"= {trace[0][-1]['dropped_total']}")
    figures.report("faults", sum(rank.faults for rank in ranks), "= 0")
    for rank in ranks:
        last = rank.pp_rank == len(ranks) - 1
        differences = assess_agreement(rank.records, trace[rank.pp_rank], last_rank=last)
        figures.report(
            f"differences_from_trace_pp{rank.pp_rank}",
            len(differences),
            "= 0",
            first=[asdict(difference) for difference in differences[:5]],
        )


def mixed_masks(rank: RankEvidence) -> int:
    """
    Steps in which a rank needed what was sampled for some requests and not for others.
    """
    records = rank.records
    return int(((records["masked"] > 0) & (records["masked"] < records["requests"])).sum())


def run_fault(figures: Figures) -> None:
    """
    Without async scheduling and with speculation, vLLM fails on one rank in the first steps.
    """
    from v2_fault import report_fault

    report_fault(figures, replace(SETTINGS, asynchronous=False, requests=4, aborted=0.0))


RUNS: dict[str, Callable[[Figures], None]] = {
    **{method: lambda figures, method=method: run_method(figures, method) for method in METHODS},
    "fault": run_fault,
}


def main() -> int:
    """
    Do the runs that were asked for; 1 if a figure missed its goal or a run failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", choices=list(RUNS))
    worst = 0
    for name in parser.parse_args().runs:
        figures = Figures(f"v2-{name}")
        progress(f"{figures.run}: starting vLLM")
        try:
            RUNS[name](figures)
        except Exception as error:  # noqa: BLE001
            figures.report("run", "failed", "= done", error=f"{type(error).__name__}: {error}"[:2000])
        worst = max(worst, figures.exit_code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
