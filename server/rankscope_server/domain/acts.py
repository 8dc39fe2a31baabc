"""
When toggles of the trim fix took effect: the marks on the chart.
"""

import numpy as np

from rankscope_server.domain.facts import EngineFacts, RankFacts
from rankscope_server.domain.fix import ACTED
from rankscope_server.domain.model import ActedMark

MARKS_KEPT = 8


def note_acts(engine: EngineFacts, known: tuple[ActedMark, ...]) -> tuple[ActedMark, ...]:
    """
    The marks that were known, and those of toggles on which a rank has acted since.

    A mark is made while the record of its step is still held, which is long after the toggle; after that it is only kept.
    """
    marks = {mark.generation: mark for mark in known}
    for rank in engine.ranks:
        mark = _mark(rank)
        if mark is not None:
            marks.setdefault(mark.generation, mark)
    return tuple(sorted(marks.values(), key=lambda mark: mark.generation)[-MARKS_KEPT:])


def _mark(rank: RankFacts) -> ActedMark | None:
    control = rank.report.control
    if control.outcome not in ACTED or control.acted_step < 1 or control.desired is None:
        return None
    record = rank.history.take(np.array([control.acted_step], np.uint64))[0]
    if not int(record["step"]):
        return None
    at = rank.clock.unix_of(int(record["begin_ns"]))
    return ActedMark(control.observed_generation, control.desired, control.acted_step, at)
