"""
The columns of a table of steps: short titles over what matters, and only those that say something.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankscope_exporter.commands.facts import Facts, Value
from rankscope_exporter.commands.text import says_something


@dataclass(frozen=True, slots=True)
class Column:
    """
    A column of the table: its title, and its value in a step. A step is shown with those that are `always` there.
    """

    title: str
    value: Callable[[Facts], Value]
    always: bool = False


def _field(title: str, name: str, *, always: bool = False) -> Column:
    return Column(title, lambda facts: facts[name], always)


def _milliseconds(facts: Facts) -> Value:
    begin, end = facts["begin_ns"], facts["end_ns"]
    if not isinstance(begin, int) or not isinstance(end, int) or end < begin:
        return None
    return (end - begin) / 1e6


def _queue(facts: Facts) -> Value:
    return None if facts["queue_depth"] is None else f"{facts['queue_filled']}/{facts['queue_depth']}"


def _phase(facts: Facts) -> Value:
    return f"{facts['phase']}, failed" if facts["failed"] else facts["phase"]


def _own(facts: Facts) -> Value:
    own = facts["own_ns"]
    return own / 1000 if isinstance(own, int) else None


def _mitigation(facts: Facts) -> Value:
    state = facts["mitigation"]
    return state.replace("_", " ") if isinstance(state, str) else None


COLUMNS = (
    _field("step", "step", always=True),
    _field("begin (UTC)", "begin", always=True),
    Column("phase", _phase, always=True),
    _field("guard", "guard", always=True),
    _field("role", "role"),
    _field("requests", "requests"),
    _field("masked", "masked"),
    _field("drift", "drift_max"),
    _field("drifting", "drifting"),
    _field("longest", "state_max"),
    _field("scheduler's", "scheduler_max"),
    _field("width", "width"),
    _field("posted", "posted"),
    Column("queue", _queue),
    _field("dropped", "dropped_total"),
    _field("new", "new"),
    _field("cached", "cached"),
    _field("finished", "finished"),
    _field("tokens", "scheduled_tokens"),
    _field("drafting", "drafting"),
    _field("trimmed", "trimmed_total"),
    Column("trim fix", _mitigation),
    _field("generation", "generation"),
    Column("ms", _milliseconds),
    Column("own us", _own),
)
"""
The facts come with `begin`, the wall-clock time of `begin_ns` as text, besides those of a record.
"""

ALIGNED = ("phase", "guard", "requests", "masked", "drift", "width", "posted")
"""
Titles of the columns that are shown for each rank where ranks stand side by side.
"""


def telling_columns(steps: Sequence[Facts], columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """
    The columns that say something about these steps: more than unknown and zero.
    """
    return [column for column in columns if column.always or says_something(column.value(facts) for facts in steps)]
