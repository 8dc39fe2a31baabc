"""
Mitigations, and what became of control words.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from rankscope_exporter.collectors.families import Families
from rankscope_exporter.collectors.reading import RankReading
from rankscope_exporter.contract import Lengths, MitigationState
from rankscope_exporter.contract import metrics as m

_STATES = tuple(state.label for state in MitigationState)
_OUTPUT_TOKENS = int(Lengths.OUTPUT_TOKENS)


def collect(ranks: Sequence[RankReading]) -> Iterable[Metric]:
    """
    Mitigations and control of each rank.
    """
    out = Families()
    for rank in ranks:
        for report in rank.mitigations:
            labels = rank.labels.more(mitigation=report.mitigation)
            out.add_states(m.MITIGATION_STATE, labels, "state", _STATES, (_STATES[report.state],))
        control = rank.control
        out.add(m.CONTROL_REQUESTED, rank, control.requested_generation)
        out.add(m.CONTROL_OBSERVED, rank, control.observed_generation)
        out.add(m.CONTROL_OUTCOME, rank, 1, outcome=control.outcome.name.lower().replace("_", " "))
        if control.desired is not None:
            out.add(m.CONTROL_DESIRED, rank, control.desired)
            out.add(m.CONTROL_EFFECTIVE, rank, control.effective_step)
        if control.acted_step:
            out.add(m.CONTROL_ACTED, rank, control.acted_step)
        if (state_part := rank.measured) is not None and state_part["lengths"] == _OUTPUT_TOKENS:
            out.add(m.TRIMMED_TOKENS, rank, int(state_part["trimmed_total"]))
    return out
