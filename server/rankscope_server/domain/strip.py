"""
The strip of guard decisions: ranks by steps.
"""

import numpy as np

from rankscope_exporter.contract import Lengths, Phase
from rankscope_server.domain.alignment import align, differing
from rankscope_server.domain.facts import EngineFacts
from rankscope_server.domain.model import Strip, StripCell
from rankscope_server.domain.words import guard_word

STRIP_STEPS = 48
"""
Steps that the strip shows.
"""


def build_strip(engine: EngineFacts, steps: int = STRIP_STEPS) -> Strip:
    """
    The guard decisions of the newest steps of all ranks of an engine.
    """
    last = max(rank.history.last for rank in engine.ranks)
    first = max(1, last - steps + 1)
    shown = tuple(range(first, last + 1))
    rows: list[tuple[str, tuple[StripCell, ...]]] = []
    for group in engine.groups:
        aligned = align([rank.history for rank in group], first, last)
        differs = differing(aligned.records["guard"], aligned.decided) if shown else np.zeros(0, bool)
        rows += [
            (
                rank.label,
                tuple(
                    _cell(step, record, bool(other))
                    for step, record, other in zip(shown, aligned.records[row], differs, strict=True)
                ),
            )
            for row, rank in enumerate(group)
        ]
    return Strip(shown, tuple(rows))


def _cell(step: int, record: np.void, differs: bool) -> StripCell:
    phase = int(record["phase"])
    decided = phase >= Phase.DECIDED
    return StripCell(
        step=step,
        guard=guard_word(record),
        masked=int(record["masked"]) if decided and record["mask_known"] else None,
        requests=int(record["requests"]) if decided else None,
        drift_max=int(record["drift_max"])
        if phase >= Phase.STATE_UPDATED and record["lengths"] == Lengths.OUTPUT_TOKENS
        else None,
        differs=differs and decided,
    )
