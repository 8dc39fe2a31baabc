"""
Masked requests.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Guard
from rankscope_exporter.contract import metrics as m

_NONE = int(Guard.NONE)


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Masked requests of each rank that came to a decision.
    """
    out = Families()
    for rank in ranks:
        decided = rank.parts.decided
        if decided is None or decided["guard"] == _NONE:
            continue
        known = bool(decided["mask_known"])
        out.add(m.MASK_KNOWN, rank, known)
        if known:
            out.add(m.MASKED, rank, int(decided["masked"]))
    return out
