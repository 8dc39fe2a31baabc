"""
What of a rank cannot be seen: the metric to alert on, whatever the reason.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Detail, HookState, MitigationState, RankLife
from rankscope_exporter.contract import metrics as m
from rankscope_exporter.hooks.targets import V1_POINTS, V2_HANDLER_POINTS, V2_MODULE_POINTS

OPTIONAL = frozenset(
    point.name for table in (V1_POINTS, V2_HANDLER_POINTS, V2_MODULE_POINTS) for point in table if point.optional
)
"""
Hooks that a release may lack without anything being missed.
"""
REASONS = ("hook off", "hook absent", "hook removed", "unknown code", "over budget", "lengths unknown", "life unknown")

# Members of an enumeration are slow to get from it, and there may be hundreds of hooks.
_ON, _ABSENT, _UNKNOWN_CODE = HookState.ON, HookState.ABSENT, MitigationState.UNKNOWN_CODE
_FULL, _UNKNOWN = Detail.FULL, RankLife.UNKNOWN


def assess_blindness(rank: RankReading) -> frozenset[str]:
    """
    Those of `REASONS` for which something of the rank cannot be seen.
    """
    reasons = set()
    for hook in rank.hooks:
        if hook.state is _ON:
            continue
        # With one pipeline rank there is no exchange, so that nothing is missed of it.
        if hook.state is not _ABSENT or (hook.hook not in OPTIONAL and rank.identity.pp_size > 1):
            reasons.add(f"hook {hook.state.value}")
    if rank.identity.runner == "unknown" or any(r.state is _UNKNOWN_CODE for r in rank.mitigations):
        reasons.add("unknown code")
    if rank.detail is not _FULL:
        reasons.add("over budget")
    if rank.parts.state is not None and rank.measured is None:
        reasons.add("lengths unknown")
    if rank.life is _UNKNOWN:
        reasons.add("life unknown")
    return frozenset(reasons)


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Every reason, of each rank.
    """
    out = Families()
    for rank in ranks:
        found = assess_blindness(rank)
        out.add_states(m.BLIND, rank.labels, "reason", REASONS, found)
    return out
