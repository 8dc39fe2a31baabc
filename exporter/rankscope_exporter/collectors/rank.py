"""
Who the rank is, whether it lives, and where it is in its steps.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Phase, RankLife
from rankscope_exporter.contract import metrics as m


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Identity, life, steps and the step in flight of each rank.
    """
    out = Families()
    for rank in ranks:
        out.add(m.RANK_INFO, rank, 1, **_info(rank))
        for life in RankLife:
            out.add(m.RANK_LIFE, rank, life is rank.life, life=life.value)
        out.add(m.RANK_STARTED, rank, rank.created_unix)
        out.add(m.STEPS, rank, rank.step)
        if rank.last is not None:
            phase = rank.phase
            out.add(m.STEP_PHASE, rank, phase)
            out.add(m.STEP_IN_FLIGHT, rank, phase is not Phase.DONE)
            if (age := rank.in_flight_seconds) is not None:
                out.add(m.STEP_IN_FLIGHT_AGE, rank, age)
        if (begin := rank.begin_unix) is not None:
            out.add(m.STEP_BEGIN, rank, begin)
        if (age := rank.last_activity_seconds) is not None:
            out.add(m.LAST_ACTIVITY, rank, round(rank.unix - age, 3))
    return out


def _info(rank: RankReading) -> dict[str, str]:
    identity = rank.identity
    return {name: _text(getattr(identity, name)) for name in m.RANK_INFO.labels}


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    return str(value).lower() if isinstance(value, bool) else str(value)
