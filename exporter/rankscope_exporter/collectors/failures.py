"""
Steps that an error of vLLM ended.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Phase
from rankscope_exporter.contract import metrics as m

_PHASES = {int(phase): phase.name.lower().replace("_", " ") for phase in Phase}


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    How many steps of each rank failed, whether its last one did, and how the last failure came about.
    """
    out = Families()
    for rank in ranks:
        out.add(m.FAILED_STEPS, rank, rank.failed_steps)
        out.add(m.STEP_FAILED, rank, rank.failed)
        if (failure := rank.failure) is not None:
            out.add(m.FAILED_STEP, rank, failure.step)
            phase = _PHASES.get(failure.phase, "unknown")
            out.add(m.FAILURE_INFO, rank, 1, phase=phase, method=failure.method, kind=failure.kind)
    return out
