"""
The sampled-token collective.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Role
from rankscope_exporter.contract import metrics as m


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Collectives posted and completed, and the last one's width and role, of each rank.
    """
    out = Families()
    for rank in ranks:
        decided, done = rank.parts.decided, rank.parts.done
        if decided is not None:
            out.add(m.COLLECTIVES_POSTED, rank, int(decided["posted_total"]))
            if width := int(decided["width"]):
                out.add(m.COLLECTIVE_WIDTH, rank, width)
            for role in (Role.SENDER, Role.RECEIVER):
                if decided["role"] == role:
                    out.add(m.COLLECTIVE_ROLE, rank, 1, role=role.name.lower())
        # A rank counts completions only where a call returns at completion; elsewhere it never gets beyond 0.
        if done is not None and (completed := int(done["completed_total"])):
            out.add(m.COLLECTIVES_COMPLETED, rank, completed)
    return out
