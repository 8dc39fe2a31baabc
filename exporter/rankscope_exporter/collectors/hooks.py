"""
Whether the hooks see anything.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import HookState
from rankscope_exporter.contract import metrics as m

_ON = HookState.ON


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Each hook of each rank, with its state, the reason for it, and its faults.
    """
    out = Families()
    for rank in ranks:
        for hook in rank.hooks:
            out.add(m.HOOK_ON, rank, hook.state is _ON, hook=hook.hook, state=hook.state.value, reason=hook.reason)
            for kind, count in hook.faults.items():
                out.add(m.HOOK_FAULTS, rank, count, hook=hook.hook, kind=kind)
    return out
