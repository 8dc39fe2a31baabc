"""
What an expression of PromQL asks for: metrics, and the labels that it names with each.

It reads what rules and dashboards are written in, not all of the language; whether an expression is valid, promtool says.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rankscope_exporter.collectors import blind, nccl
from rankscope_exporter.contract import Detail, Guard, MitigationState, Phase, RankLife, Role
from rankscope_exporter.contract.metrics import METRICS, RANK_LABELS, MetricSpec

TARGET_LABELS = frozenset({"job", "instance", "deployment"})
"""What Prometheus and its scrape configuration add."""

VALUES: dict[tuple[str, str], frozenset[str]] = {
    ("rankscope_rank_life", "life"): frozenset(life.value for life in RankLife),
    ("rankscope_guard_decision", "decision"): frozenset(guard.name.lower() for guard in Guard),
    ("rankscope_mitigation_state", "state"): frozenset(state.label for state in MitigationState),
    ("rankscope_rank_blind", "reason"): frozenset(blind.REASONS),
    ("rankscope_detail_level", "level"): frozenset(level.name.lower() for level in Detail),
    ("rankscope_nccl_communicator_state", "state"): frozenset(nccl.STATES),
    ("rankscope_collective_role", "role"): frozenset(role.name.lower() for role in Role),
    ("rankscope_flight_files", "state"): frozenset({"readable", "unreadable", "superseded"}),
    ("rankscope_rank_info", "runner"): frozenset({"V1", "V2", "unknown"}),
    ("rankscope_failed_step_info", "phase"): frozenset(phase.name.lower().replace("_", " ") for phase in Phase),
}
"""Labels that have a fixed set of values."""

_SPECS: dict[str, MetricSpec] = {name: spec for spec in METRICS for name in (spec.name, *spec.sample_names)}
_SELECTOR = re.compile(r"(?<![\w:$])(rankscope_\w+|up|ALERTS)\b(?!:)(?:\s*\{([^}]*)\})?")
_RECORDED = re.compile(r"\b(\w+:rankscope_\w+:\w+)\b")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label."""

    label: str
    operator: str
    value: str


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric as an expression asks for it."""

    metric: str
    matchers: tuple[Matcher, ...] = ()


def selectors(expression: str) -> list[Selector]:
    """The metrics that were scraped, with their conditions; without those that rules recorded."""
    bare = _without_strings(expression)
    return [
        Selector(
            found[1],
            tuple(Matcher(*each) for each in _MATCHER.findall(expression[found.start() : found.end()])),
        )
        for found in _SELECTOR.finditer(bare)
    ]


def recorded(expression: str) -> set[str]:
    """The metrics of recording rules that an expression asks for."""
    return set(_RECORDED.findall(_without_strings(expression)))


def groupings(expression: str) -> set[str]:
    """Labels that an expression groups, joins or carries over by."""
    found = _GROUPING.findall(expression)
    return {label.strip() for labels in found for label in labels.split(",") if label.strip()}


def complaints(expression: str, more_labels: frozenset[str] = frozenset()) -> Iterator[str]:
    """What an expression asks for that the contract does not have; `more_labels` are others that it may group by."""
    known = set(TARGET_LABELS | more_labels)
    for selector in selectors(expression):
        spec = _SPECS.get(selector.metric)
        if spec is None:
            if selector.metric not in {"up", "ALERTS"}:
                yield f"{selector.metric} does not exist"
            continue
        own = {*spec.labels, *(RANK_LABELS if spec.per_rank else ()), *(("le",) if spec.kind == "histogram" else ())}
        known |= own
        for matcher in selector.matchers:
            if matcher.label not in own | TARGET_LABELS:
                yield f"{selector.metric} has no label {matcher.label}"
            values = VALUES.get((spec.name, matcher.label))
            if values is not None and not _fits(matcher, values):
                yield f"{selector.metric} never has {matcher.label}{matcher.operator}{matcher.value!r}"
    if not recorded(expression):
        yield from (f"nothing has the label {label}" for label in sorted(groupings(expression) - known))


def _without_strings(expression: str) -> str:
    """The expression with strings blanked, so that places stay the same."""
    return re.sub(r'"((?:[^"\\]|\\.)*)"', lambda found: '"' + "_" * len(found[1]) + '"', expression)


def _fits(matcher: Matcher, values: frozenset[str]) -> bool:
    """Whether each word that a condition names is a value that the label can have."""
    if matcher.value.startswith("$"):
        return True  # a variable of a dashboard
    if matcher.operator in {"=", "!="}:
        return matcher.value in values
    return all(any(re.fullmatch(word, value) for value in values) for word in matcher.value.split("|"))
