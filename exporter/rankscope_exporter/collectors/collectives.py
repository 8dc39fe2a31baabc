"""
The exchange of sampled tokens: its collectives, and the queue of what was received.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Guard, Role
from rankscope_exporter.contract import metrics as m

_NONE = int(Guard.NONE)
_ROLES = {int(role): role.name.lower() for role in (Role.SENDER, Role.RECEIVER)}


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Collectives posted and completed, the last one's width and role, and the receive queue, of each rank.
    """
    out = Families()
    for rank in ranks:
        state, decided, done = rank.parts.state, rank.parts.decided, rank.parts.done
        if decided is not None:
            out.add(m.COLLECTIVES_POSTED, rank, int(decided["posted_total"]))
            if decided["guard"] != _NONE:
                out.add(m.STEP_POSTED, rank, int(decided["posted"]))
            if width := int(decided["width"]):
                out.add(m.COLLECTIVE_WIDTH, rank, width)
            if (role := _ROLES.get(int(decided["role"]))) is not None:
                out.add(m.COLLECTIVE_ROLE, rank, 1, role=role)
        if done is not None and rank.identity.completes:
            out.add(m.COLLECTIVES_COMPLETED, rank, int(done["completed_total"]))
        if state is not None and (slots := int(state["queue_depth"])):
            out.add(m.QUEUE_SLOTS, rank, slots)
            out.add(m.QUEUE_FILLED, rank, int(state["queue_filled"]))
            out.add(m.DROPPED_ROWS, rank, int(state["dropped_total"]))
    return out
