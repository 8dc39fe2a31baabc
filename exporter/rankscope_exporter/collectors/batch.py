"""
What the scheduler gave the rank to do.
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
    Requests and tokens of the last step of each rank.
    """
    out = Families()
    for rank in ranks:
        if (begun := rank.parts.begun) is not None:
            for kind in ("new", "cached", "finished"):
                out.add(m.SCHEDULED_REQUESTS, rank, int(begun[kind]), kind=kind)
            out.add(m.SCHEDULED_TOKENS, rank, int(begun["scheduled_tokens"]))
            out.add(m.SPECULATIVE, rank, int(begun["drafting"]))
        decided = rank.parts.decided
        if decided is not None and decided["guard"] != _NONE:
            out.add(m.BATCH_REQUESTS, rank, int(decided["requests"]))
    return out
