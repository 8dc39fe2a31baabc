"""
Guard decisions. Whether two ranks disagree is not told here: a scrape sees ranks at different steps.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Guard
from rankscope_exporter.contract import metrics as m

_GUARDS = tuple(guard.name.lower() for guard in Guard)


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Guard decisions of each rank, by kind.
    """
    out = Families()
    for rank in ranks:
        if (decided := rank.parts.decided) is not None:
            out.add(m.GUARD_BROADCASTS, rank, int(decided["broadcasts_total"]))
            out.add(m.GUARD_SKIPS, rank, int(decided["skips_total"]))
            last = _GUARDS[int(decided["guard"])] if decided["guard"] < len(_GUARDS) else ""
            out.add_states(m.GUARD_LAST, rank.labels, "decision", _GUARDS, (last,))
    return out
