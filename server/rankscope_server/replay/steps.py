"""
One step on all ranks of an engine, side by side.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope_exporter.contract import Guard, Lengths, MitigationState, Phase, Role
from rankscope_server.domain.history import Records
from rankscope_server.replay.engines import EngineRank, SavedEngine
from rankscope_server.replay.text import moment_text, table_lines

UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class StepRow:
    """
    One fact of a step, as each rank has it; None where a rank does not know.
    """

    name: str
    values: tuple[str | None, ...]
    compared: bool
    """Whether all ranks must have the same."""

    @property
    def differs(self) -> bool:
        """Whether two ranks that know it have different words for what must be the same."""
        return self.compared and len({value for value in self.values if value is not None}) > 1


def _begun(_: np.void) -> bool:
    return True


def _updated(record: np.void) -> bool:
    return bool(record["phase"] >= Phase.STATE_UPDATED and record["lengths"] != Lengths.UNKNOWN)


def _decided(record: np.void) -> bool:
    return bool(record["phase"] >= Phase.DECIDED and record["guard"] != Guard.NONE)


def _masked(record: np.void) -> bool:
    return _decided(record) and bool(record["mask_known"])


def _wide(record: np.void) -> bool:
    return _decided(record) and bool(record["width"])


def _queued(record: np.void) -> bool:
    return bool(record["phase"] >= Phase.STATE_UPDATED and record["queue_depth"])


def _number(name: str) -> Callable[[np.void], str]:
    return lambda record: str(int(record[name]))


def _word(name: str, kind: type[Phase | Guard | Role | Lengths | MitigationState]) -> Callable[[np.void], str]:
    words = {member.value: member.name.lower().replace("_", " ") for member in kind}
    return lambda record: words.get(int(record[name]), f"unknown ({int(record[name])})")


def _hash(name: str) -> Callable[[np.void], str]:
    return lambda record: f"{int(record[name]):016x}"


_FACTS: tuple[tuple[str, Callable[[np.void], bool], Callable[[np.void], str], bool], ...] = (
    ("phase", _begun, _word("phase", Phase), False),
    ("failed", _begun, lambda record: "yes" if record["failed"] else "no", False),
    ("batch hash", _begun, _hash("batch_hash"), True),
    ("new requests", _begun, _number("new"), True),
    ("cached requests", _begun, _number("cached"), True),
    ("finished requests", _begun, _number("finished"), True),
    ("scheduled tokens", _begun, _number("scheduled_tokens"), True),
    ("requests with drafts", _begun, _number("drafting"), True),
    ("control generation", _begun, _number("generation"), False),
    ("lengths count", _updated, _word("lengths", Lengths), False),
    ("rank's tokens", _updated, _number("state_sum"), False),
    ("scheduler's tokens", _updated, _number("scheduler_sum"), False),
    ("largest drift", _updated, _number("drift_max"), False),
    ("drifting requests", _updated, _number("drifting"), False),
    ("trim fix", _updated, _word("mitigation", MitigationState), True),
    ("receive queue filled", _queued, lambda r: f"{int(r['queue_filled'])} of {int(r['queue_depth'])}", False),
    ("guard", _decided, _word("guard", Guard), True),
    ("role", _decided, _word("role", Role), False),
    ("requests", _decided, _number("requests"), True),
    ("masked requests", _masked, _number("masked"), True),
    ("mask hash", _masked, _hash("mask_hash"), True),
    ("columns", _wide, _number("width"), False),
    ("collectives posted", _decided, _number("posted"), False),
)


def extract_step(engine: SavedEngine, step: int) -> tuple[StepRow, ...]:
    """
    The facts of a step, each as all ranks have it; empty if no rank has a record of it.
    """
    records = [_record_of(rank.saved.records, step) for rank in engine.ranks]
    if all(record is None for record in records):
        return ()
    rows = [
        StepRow(name, tuple(None if r is None or not known(r) else say(r) for r in records), compared)
        for name, known, say, compared in _FACTS
    ]
    rows += [
        StepRow(name, tuple(map(say, engine.ranks, records)), compared=False)
        for name, say in (("begun", _begin_text), ("decided", _decide_text), ("done", _end_text))
    ]
    return tuple(row for row in rows if any(value is not None for value in row.values))


def _record_of(records: Records, step: int) -> np.void | None:
    found = np.flatnonzero(records["step"] == step)
    return records[int(found[0])] if found.size else None


def _begin_text(rank: EngineRank, record: np.void | None) -> str | None:
    return None if record is None else moment_text(rank.unix_ns(int(record["begin_ns"])) / 1e9, digits=3)


def _decide_text(_: EngineRank, record: np.void | None) -> str | None:
    return None if record is None or not _decided(record) else _later(record, "decide_ns")


def _end_text(_: EngineRank, record: np.void | None) -> str | None:
    return None if record is None or record["phase"] < Phase.DONE else _later(record, "end_ns")


def _later(record: np.void, name: str) -> str:
    return f"+{(int(record[name]) - int(record['begin_ns'])) / 1e6:.1f} ms"


def step_lines(engine: SavedEngine, step: int, rows: Sequence[StepRow]) -> Iterator[str]:
    """
    The step as a table, with a mark where ranks differ in what must be the same.
    """
    if not rows:
        yield f"  step {step}: no rank has a record of it"
        return
    yield f"  step {step} on each rank"
    titles = ["", *(rank.label for rank in engine.ranks), ""]
    words = [[row.name, *(value or UNKNOWN for value in row.values), "differs" if row.differs else ""] for row in rows]
    yield from (f"    {line}" for line in table_lines(titles, words))
