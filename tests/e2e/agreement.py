"""
Whether what flight files say of a V2 run is what vLLM computed in it, as the lab's trace of the same run has it.

Pure: step records on one side, lines of the trace on the other, and the differences between them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Guard, Lengths, Phase, Role

Records = npt.NDArray[np.void]
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """
    A field of a step that the flight file and the trace tell differently.
    """

    step: int
    field: str
    flight: int
    trace: int


def expect(line: Line, posted_before: int) -> dict[str, int]:
    """
    The fields of a step record that follow from a line of the trace. `posted_before` is what this rank had posted up to then.
    """
    posted = len(line["wire"])
    expected = {
        "step": line["step"],
        "new": len(line["new"]),
        "cached": len(line["cached"]),
        "finished": len(line["finished"]),
        "scheduled_tokens": line["tokens"],
        "drafting": line["drafting"],
        "lengths": Lengths.COMPUTED_TOKENS,
        "state_sum": sum(line["host"].values()),
        "scheduler_sum": sum(line["cached"].values()),
        "queue_depth": line["queue"][0],
        "queue_filled": line["queue"][1],
        "dropped_total": line["dropped_total"],
        "posted": posted,
        "posted_total": posted_before + posted,
        "guard": Guard.NONE,
        "phase": Phase.DONE,
        "failed": 0,
    }
    if line["masks"]:
        mask, rows = line["masks"][0], len(line["rows"])
        expected["guard"] = Guard.SKIP if mask is None else Guard.BROADCAST
        expected["requests"] = rows
        expected["masked"] = rows if mask is None else rows - sum(mask)
        expected["mask_known"] = 1
    if posted:
        expected["width"] = line["wire"][0][0][1]
    return {field: int(value) for field, value in expected.items()}


def assess_agreement(records: Records, lines: Sequence[Line], *, last_rank: bool) -> list[Difference]:
    """
    Where the records of a rank and its lines differ; a step that only one of them has is a difference too.
    """
    found: list[Difference] = []
    by_step = {int(record["step"]): record for record in records}
    posted = 0
    for line in lines:
        expected = expect(line, posted)
        posted = expected["posted_total"]
        record = by_step.pop(line["step"], None)
        if record is None:
            found.append(Difference(line["step"], "step", 0, line["step"]))
            continue
        if expected["posted"]:
            expected["role"] = int(Role.SENDER if last_rank else Role.RECEIVER)
        found += [
            Difference(line["step"], field, int(record[field]), value)
            for field, value in expected.items()
            if int(record[field]) != value
        ]
    return found + [Difference(step, "step", step, 0) for step in by_step]


@dataclass(frozen=True, slots=True)
class Parting:
    """
    In how many steps the ranks of a run differ, by what they differ in.
    """

    steps: int
    guards: int
    masks: int
    widths: int
    collectives: int
    batches: int


def compare_ranks(first: Records, last: Records) -> Parting:
    """
    Compare two ranks of an engine in the steps that both have.
    """
    common = np.intersect1d(first["step"], last["step"])
    a, b = (records[np.isin(records["step"], common)] for records in (first, last))

    def differ(*fields: str) -> int:
        return int(np.logical_or.reduce([a[field] != b[field] for field in fields]).sum())

    return Parting(
        steps=len(common),
        guards=differ("guard"),
        masks=differ("mask_hash", "masked", "requests"),
        widths=int(((a["width"] != b["width"]) & (a["guard"] == Guard.BROADCAST)).sum()),
        collectives=differ("posted", "posted_total"),
        batches=differ("batch_hash"),
    )


def widths_on_the_wire(lines: Iterable[Line]) -> set[int]:
    """
    Columns of the sampled-token messages that went over the wire.
    """
    return {line["wire"][0][0][1] for line in lines if line["wire"]}
