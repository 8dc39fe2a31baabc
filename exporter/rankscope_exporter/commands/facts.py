"""
What a step record says, as names and values, with None for what it does not know.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rankscope_exporter.contract.words import Guard, Lengths, MitigationState, Phase, Role
from rankscope_exporter.flight.layout import STEP_DTYPE

Value = int | str | bool | float | None
Facts = dict[str, Value]

_BEGUN = ("begin_ns", "new", "cached", "finished", "scheduled_tokens", "drafting", "generation")
_LENGTHS = ("state_sum", "scheduler_sum", "drift_sum", "state_max", "scheduler_max", "drift_max", "drifting")
_TOTALS = ("trimmed_total", "dropped_total")
_QUEUE = ("queue_depth", "queue_filled")
_DECISION = ("decide_ns", "requests", "posted")
_MASK = ("masked", "mask_hash")
_DECIDED_TOTALS = ("broadcasts_total", "skips_total", "posted_total")
_DONE = ("end_ns", "completed_total", "own_ns_total")
_HASHES = {"batch_hash", "mask_hash"}
_INTERNAL = {"state_pad", "reserved", "mask_known"}

_FIRST = ("step", "phase", "failed")
FIELDS: tuple[str, ...] = (*_FIRST, *(n for n in STEP_DTYPE.names or () if n not in {*_FIRST, *_INTERNAL}))
"""
Names of the facts of a step, in the order in which they are written.
"""


def step_facts(record: np.void) -> Facts:
    """
    The facts of a whole record, as readers give it. Hashes come as text: not every program keeps integers of 64 bits.
    """
    phase = int(record["phase"])
    lengths = int(record["lengths"])
    decided = phase >= Phase.DECIDED and record["guard"] != Guard.NONE
    known = dict.fromkeys((*_FIRST, "batch_hash", *_BEGUN), True)
    known |= dict.fromkeys(
        (*_LENGTHS, *_TOTALS, "lengths"), phase >= Phase.STATE_UPDATED and lengths != Lengths.UNKNOWN
    )
    known |= dict.fromkeys(_QUEUE, phase >= Phase.STATE_UPDATED and bool(record["queue_depth"]))
    # A step whose request state nobody read has zeros there, and 0 is also a state of the mitigation.
    known["mitigation"] = phase >= Phase.STATE_UPDATED and bool(lengths or record["mitigation"])
    known |= dict.fromkeys((*_DECISION, "guard", "role"), decided)
    known |= dict.fromkeys(_MASK, decided and bool(record["mask_known"]))
    known["width"] = decided and bool(record["width"])
    known |= dict.fromkeys(_DECIDED_TOTALS, phase >= Phase.DECIDED)
    known |= dict.fromkeys(_DONE, phase >= Phase.DONE)
    known["own_ns"] = phase >= Phase.DONE and bool(record["own_ns"])
    return {name: _value(name, int(record[name])) if known[name] else None for name in FIELDS}


_WORDS: dict[str, Callable[[int], Any]] = {
    "phase": Phase,
    "guard": Guard,
    "role": Role,
    "lengths": Lengths,
    "mitigation": MitigationState,
}


def _value(name: str, number: int) -> Value:
    if name in _HASHES:
        return f"{number:016x}"
    if name == "failed":
        return bool(number)
    if name not in _WORDS:
        return number
    try:
        word: str = _WORDS[name](number).name
    except ValueError:  # a word of a later release, or damage
        return f"unknown ({number})"
    return word.lower()
