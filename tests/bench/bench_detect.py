"""
CPU time of detection: looks at engines of many ranks in healthy traffic, twelve new steps at each, in one process.

Cost is that of `assess` alone, except for the share of a fleet, where taking the records in is counted as well. The same
looks at the same traffic with a fault in it must find it: a detector that finds nothing is cheap.
"""

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import figures
from made_ranks import ManualClock, made_record, made_records, made_report, made_v2_records, made_v2_report

from rankscope_exporter.contract import HookReport, HookState, MitigationState, Phase, RankLife, RankReport, Role
from rankscope_server.domain.clock import Moment, NodeClock
from rankscope_server.domain.facts import EngineFacts, ExporterFacts, RankFacts, rank_labels
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.history import Records, StepHistory
from rankscope_server.domain.model import FindingKind, RankId

STEPS_A_LOOK = 12
LOOKS_A_SECOND = 4
SIZES = {8: (8, 1), 64: (8, 8), 1024: (8, 128)}
"""
Pipeline and tensor ranks of one engine, by their product.
"""
FLEET_ENGINES, FLEET_STEPS_A_SECOND = 128, 50
FAULT_STEP, FAULT_STEPS = 30, 48
"""
The step at which faults begin, and the steps that such an engine takes at most.
"""
HOOKS = (
    "execute_model", "_update_states", "_pp_receive_prev_sampled_token_ids_to_input_batch", "_pp_broadcast_prev_sampled_token_ids",
    "_is_all_reqs_chunked_prefill", "discard_request_mask",
)  # fmt: skip
URL = "http://node:9610"


class MadeEngine:
    """
    An engine whose ranks take the steps of `records`, each as far behind the first as its stage is.
    """

    def __init__(self, records: Sequence[Records], reports: Sequence[RankReport]) -> None:
        self.now = ManualClock().now()
        self.memory = EngineMemory()
        self.facts = EngineFacts("chat", "e1", (), ())
        self._records = records
        self._reached = 0
        ids = [RankId(0, report.identity.pp_rank, report.identity.tp_rank) for report in reports]
        clock = NodeClock(0, self.now.unix, self.now.monotonic)
        self._ranks = [
            RankFacts(rank, label, report, StepHistory(), clock, URL, 0.0, 0.0)
            for rank, label, report in zip(ids, rank_labels(ids), reports, strict=True)
        ]

    def answer(self, count: int) -> list[Records]:
        """
        So many steps more of each rank, as one answer has them: the newest is in flight, and comes again with the next ones.
        """
        self._reached += count
        answers = []
        for rank, records in zip(self._ranks, self._records, strict=True):
            end = max(0, self._reached - rank.id.pp_rank // 2)
            answers.append(np.concatenate([records[max(0, end - count) : end], in_flight(records[end : end + 1])]))
        return answers

    def absorb(self, answers: Sequence[Records]) -> None:
        """
        Take in such an answer.
        """
        for rank, records in zip(self._ranks, answers, strict=True):
            rank.history.absorb(records)

    def end(self, row: int) -> None:
        """
        The process of a rank ends.
        """
        rank = self._ranks[row]
        report = rank.report.model_copy(update={"life": RankLife.GONE})
        self._ranks[row] = dataclasses.replace(rank, report=report, life_since=self.now.monotonic)

    def poll(self, quiet: float = 0.0) -> None:
        """
        What its exporter says a quarter of a second later, `quiet` seconds after the last thing that a rank did.
        """
        heads = [head for rank in self._ranks if (head := rank.history.head) is not None]
        last = max(max(head.begin_ns, head.decide_ns, head.end_ns) for head in heads)
        self.now = Moment(self.now.unix + 0.25, self.now.monotonic + 0.25)
        clock = NodeClock(last + int(quiet * 1e9), self.now.unix, self.now.monotonic)
        ranks = tuple(dataclasses.replace(rank, clock=clock, reported=self.now.monotonic) for rank in self._ranks)
        exporter = ExporterFacts(URL, self.now.monotonic, "", control=True, token=True, since=0.0)
        self.facts = EngineFacts("chat", "e1", ranks, (exporter,))

    def look(self) -> None:
        """
        What is measured.
        """
        self.memory = assess(self.facts, self.memory, self.now)


def in_flight(record: Records) -> Records:
    """
    A record as it was before its step ended.
    """
    begun = record.copy()
    begun["phase"], begun["end_ns"] = np.minimum(record["phase"], int(Phase.DECIDED)), 0
    return begun


def made_engine(pp_size: int, tp_size: int, records: Records) -> MadeEngine:
    """
    A healthy engine, all of whose ranks have the same records.
    """
    hooks = [HookReport(hook=hook, state=HookState.ON) for hook in HOOKS]
    reports = [
        made_report(pp, tp_rank=tp, pp_size=pp_size, tp_size=tp_size, hooks=hooks)
        for pp in range(pp_size)
        for tp in range(tp_size)
    ]
    return MadeEngine([records] * len(reports), reports)


def timed(work: Callable[[], Any]) -> float:
    """
    CPU seconds of this process.
    """
    begin = time.process_time()
    work()
    return time.process_time() - begin


def usual(times: Sequence[float]) -> float:
    """
    Median of the quieter half: neighbours on the machine only ever add to what is measured.
    """
    return statistics.median(sorted(times)[: -(-len(times) // 2)])


def measure(engines: Sequence[MadeEngine], looks: int) -> tuple[list[float], list[float]]:
    """
    CPU seconds of each look at all engines in healthy traffic, and of taking in what is looked at; the first is left out.
    """
    absorbing, looking = [], []
    gc.collect()
    for _ in range(looks + 1):
        answers = [engine.answer(STEPS_A_LOOK) for engine in engines]
        absorbing.append(timed(lambda: [engine.absorb(one) for engine, one in zip(engines, answers, strict=True)]))  # noqa: B023
        for engine in engines:
            engine.poll()
        looking.append(timed(lambda: [engine.look() for engine in engines]))
    found = [finding.sentence for engine in engines for finding in engine.memory.all_findings]
    if found:
        msg = f"healthy traffic is called wrong: {found[0]}"
        raise AssertionError(msg)
    return looking[1:], absorbing[1:]


def faulty(kind: FindingKind) -> tuple[MadeEngine, float]:
    """
    A pair of ranks in the same traffic with a fault of a kind in it, and for how long it is quiet in the end.
    """
    first, second = made_records(1, FAULT_STEPS), made_records(1, FAULT_STEPS)
    reports = [made_report(pp) for pp in (0, 1)]
    after, there = first["step"] >= FAULT_STEP, first["step"] == FAULT_STEP
    stuck = made_record(FAULT_STEP, Phase.DECIDED, role=Role.SENDER)
    quiet = 0.0
    match kind:
        case FindingKind.DRIFT:
            first["drift_max"][after], first["drifting"][after] = 3, 1
        case FindingKind.MASK_DISAGREEMENT:
            first["masked"][there] = first["mask_hash"][there] = 2
        case FindingKind.GUARD_DISAGREEMENT:
            first[there] = made_record(FAULT_STEP, masked=8)
        case FindingKind.WIDTH_MISMATCH:
            first, second = made_v2_records(1, FAULT_STEPS), made_v2_records(1, FAULT_STEPS, role=Role.SENDER)
            second["width"][there] = 1
            reports = [made_v2_report(pp) for pp in (0, 1)]
        case FindingKind.BATCH_MISMATCH:
            second["batch_hash"][after] += np.uint64(1)
        case FindingKind.WEDGED:
            first = np.concatenate([first[: FAULT_STEP - 1], made_record(FAULT_STEP, masked=8)])
            second = np.concatenate([second[: FAULT_STEP - 1], stuck])
            quiet = 4.0
        case FindingKind.STALLED:
            first, second = first[: FAULT_STEP - 1], np.concatenate([second[: FAULT_STEP - 1], stuck])
            quiet = 12.0
        case FindingKind.RANK_LOST:
            second = np.concatenate([second[: FAULT_STEP - 1], stuck])
        case FindingKind.MITIGATION_MIXED:
            first["mitigation"][after] = int(MitigationState.APPLIED)
            reports[0] = made_report(0, trim=MitigationState.APPLIED)
        case FindingKind.BLIND:
            reports[1] = made_report(1, hooks=[HookReport(hook="_update_states", state=HookState.OFF, reason="a test")])
    return MadeEngine([first, second], reports), quiet


def find(kind: FindingKind) -> bool:
    """
    Whether a fault of a kind is found by the looks that are measured, at its step if it has one.
    """
    engine, quiet = faulty(kind)
    for _ in range(0, FAULT_STEPS, STEPS_A_LOOK):
        engine.absorb(engine.answer(STEPS_A_LOOK))
        engine.poll()
        engine.look()
    if kind is FindingKind.RANK_LOST:
        engine.end(1)
    engine.poll(quiet)
    engine.look()
    found = [finding for finding in engine.memory.all_findings if finding.open and finding.kind is kind]
    return bool(found) and found[0].step in (FAULT_STEP, None)


def main() -> int:
    """
    Measure, print figures; 1 if a goal was missed.
    """
    parser = argparse.ArgumentParser(description="CPU time of detection.")
    parser.add_argument("--looks", type=int, default=60, help="looks at each engine (60)")
    options = parser.parse_args()
    records = made_records(1, STEPS_A_LOOK * (options.looks + 2))
    out = figures.Figures("detect")

    figures.progress("detect: one engine of 2 ranks")
    looking, absorbing = measure([made_engine(2, 1, records)], options.looks)
    out.report(
        "look_seconds", round(usual(looking), 6), "<= 0.00025",
        median=round(statistics.median(looking), 6), absorb_seconds=round(usual(absorbing), 6),
    )  # fmt: skip
    costs = {}
    for ranks, (pp_size, tp_size) in SIZES.items():
        figures.progress(f"detect: one engine of {ranks} ranks")
        looking, absorbing = measure([made_engine(pp_size, tp_size, records)], options.looks)
        costs[ranks] = usual(looking) / ranks / STEPS_A_LOOK
        out.report(
            f"rank_steps_per_second_{ranks}", round(1 / costs[ranks]), look_seconds=round(usual(looking), 6),
            absorb_seconds=round(usual(absorbing), 6),
        )  # fmt: skip
    least, most = min(costs), max(costs)
    out.report("cost_ratio", round(costs[most] / costs[least], 3), "<= 1.25", of=f"{most} ranks to {least}")

    figures.progress(f"detect: {FLEET_ENGINES} engines of 8 ranks")
    fleet = [made_engine(*SIZES[8], records) for _ in range(FLEET_ENGINES)]
    looking, absorbing = measure(fleet, options.looks)
    rounds_a_second = max(LOOKS_A_SECOND, FLEET_STEPS_A_SECOND / STEPS_A_LOOK)
    shares = [usual(times) * rounds_a_second for times in (looking, absorbing)]
    out.report(
        "fleet_share", round(sum(shares), 3), "<= 0.5", engines=FLEET_ENGINES, ranks=8, looks=round(shares[0], 3),
        absorbing=round(shares[1], 3), cost_to_one_engine=round(usual(looking) / FLEET_ENGINES / 8 / STEPS_A_LOOK / costs[8], 3),
    )  # fmt: skip
    missed = [kind.value for kind in FindingKind if not find(kind)]
    out.report("found_with_all_kinds", len(FindingKind) - len(missed), f"= {len(FindingKind)}", missed=missed)
    return out.exit_code


if __name__ == "__main__":
    sys.exit(main())
