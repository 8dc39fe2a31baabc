"""
Who the rank is, whether it lives, and where it is in its steps.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Phase, RankLife
from rankscope_exporter.contract import metrics as m

_WRITING = Phase.WRITING
_LIVES = tuple(life.value for life in RankLife)


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Identity, life, steps and the step in flight of each rank.
    """
    out = Families()
    for rank in ranks:
        out.add_labels(m.RANK_INFO, rank.info, 1)
        out.add_states(m.RANK_LIFE, rank.labels, "life", _LIVES, (rank.life.value,))
        out.add(m.RANK_STARTED, rank, rank.created_unix)
        out.add(m.STEPS, rank, rank.step)
        if (phase := rank.phase) is not _WRITING:
            out.add(m.STEP_PHASE, rank, phase)
            out.add(m.STEP_IN_FLIGHT, rank, rank.in_flight)
            if (age := rank.in_flight_seconds) is not None:
                out.add(m.STEP_IN_FLIGHT_AGE, rank, age)
        if (begin := rank.begin_unix) is not None:
            out.add(m.STEP_BEGIN, rank, begin)
        if (age := rank.last_activity_seconds) is not None:
            out.add(m.LAST_ACTIVITY, rank, round(rank.unix - age, 3))
    return out
