"""
Step records of several ranks as a trace that Perfetto opens (ui.perfetto.dev, or any viewer of Chrome's trace format).

A process per engine, a thread per rank. Steps are slices, with what is before and after the guard's decision nested in
them (when the state was updated is not recorded); decisions are instants; drift is a counter per rank; where ranks
disagree, an arrow leads from rank to rank. Times are aligned by the clocks of the nodes, which may be off by milliseconds:
what is the same step is told by its number.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Guard, Lengths, MitigationState, Phase, Role
from rankscope_server.domain.clock import NodeClock
from rankscope_server.domain.facts import EngineFacts
from rankscope_server.domain.history import Records
from rankscope_server.incidents.reading import CaptureFile

MOST_RECORDS = 60_000
"""
Records of all ranks that a trace holds at most: viewers in a browser do not take much more. The newest steps stay.
"""

DISAGREEMENTS_SHOWN = 64
"""
Steps at which ranks differ that are marked, of each kind: the first ones.
"""

Event = dict[str, Any]
Known = Callable[[Records], npt.NDArray[np.bool_]]

_GUARDS: dict[int, str] = {Guard.BROADCAST: "broadcast", Guard.SKIP: "skip"}

_PHASES: dict[int, str] = {
    Phase.SCHEDULED: "scheduled",
    Phase.STATE_UPDATED: "state updated",
    Phase.DECIDED: "decided",
    Phase.DONE: "done",
}


@dataclass(frozen=True, slots=True)
class TraceRank:
    """
    A rank in a trace.
    """

    label: str
    dp_rank: int
    records: Records
    """Oldest first, one of each step."""
    clock: NodeClock
    """Its time is when the copy was made: until then a step in flight is shown."""


@dataclass(frozen=True, slots=True)
class TraceEngine:
    """
    An engine in a trace.
    """

    name: str
    ranks: tuple[TraceRank, ...]
    marks: tuple[tuple[float, str], ...] = field(default=())
    """What else happened, as Unix seconds and words: findings, toggles of the fix."""


def trace_of_engine(engine: EngineFacts, marks: Iterable[tuple[float, str]] = ()) -> TraceEngine:
    """
    An engine as the server holds it.
    """
    ranks = tuple(
        TraceRank(rank.label, rank.id.dp_rank, rank.history.tail(rank.history.capacity), rank.clock)
        for rank in engine.ranks
    )
    return TraceEngine(f"{engine.deployment} {engine.engine}", ranks, tuple(marks))


def trace_of_capture(capture: CaptureFile) -> TraceEngine:
    """
    The engine in a capture.

    Raises:
        CaptureError: a file of the capture cannot be read.

    """
    ranks = []
    for rank, flight in capture.flights():
        clock = NodeClock(rank.clock.monotonic_ns, rank.clock.unix, 0.0)
        ranks.append(TraceRank(rank.label, rank.dp_rank, flight.records(), clock))
    manifest = capture.manifest
    marks = [(one["since_unix"], f"{one['kind']}: {one['sentence']}") for one in manifest.findings if _is_mark(one)]
    return TraceEngine(f"{manifest.deployment} {manifest.engine}", tuple(ranks), tuple(marks))


def _is_mark(finding: dict[str, Any]) -> bool:
    return isinstance(finding.get("since_unix"), int | float) and {"kind", "sentence"} <= finding.keys()


def trace_json(capture: bytes) -> bytes:
    """
    The trace of a capture, both as files. Takes seconds for hundreds of ranks: not to be called in an event loop.

    Raises:
        CaptureError: the capture cannot be read.

    """
    return build_trace([trace_of_capture(CaptureFile(capture))])


def build_trace(engines: Sequence[TraceEngine]) -> bytes:
    """
    The trace as JSON.
    """
    engines, left_out = _bounded(engines)
    start = min((_start_unix(rank) for engine in engines for rank in engine.ranks if len(rank.records)), default=0.0)
    events: list[Event] = []
    for pid, engine in enumerate(engines, start=1):
        events += _engine_events(engine, pid, start)
    other = {"start_unix": start, "steps_left_out": left_out}
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":")
    ).encode()


def _bounded(engines: Sequence[TraceEngine]) -> tuple[list[TraceEngine], int]:
    """
    The engines with as many of their newest records as a trace may hold, and how many were left out.
    """
    count = sum(len(rank.records) for engine in engines for rank in engine.ranks)
    if count <= MOST_RECORDS:
        return list(engines), 0
    each = max(1, MOST_RECORDS // sum(len(engine.ranks) for engine in engines))
    cut = [
        TraceEngine(
            engine.name,
            tuple(TraceRank(r.label, r.dp_rank, r.records[-each:], r.clock) for r in engine.ranks),
            engine.marks,
        )
        for engine in engines
    ]
    return cut, count - sum(len(rank.records) for engine in cut for rank in engine.ranks)


def _start_unix(rank: TraceRank) -> float:
    return rank.clock.unix_of(int(rank.records["begin_ns"].min()))


def _engine_events(engine: TraceEngine, pid: int, start: float) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": engine.name}}
    axes = [_Axis(rank.clock, start) for rank in engine.ranks]
    for tid, (rank, axis) in enumerate(zip(engine.ranks, axes, strict=True), start=1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": rank.label}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        yield from _rank_events(rank, axis, pid, tid)
    yield from _disagreements(engine.ranks, axes, pid)
    for unix, words in engine.marks:
        yield {"ph": "i", "s": "p", "pid": pid, "tid": 1, "ts": _micros(unix - start), "name": words, "cat": "finding"}


@dataclass(frozen=True, slots=True)
class _Axis:
    """
    Times of a node as microseconds since the trace begins.
    """

    clock: NodeClock
    start: float

    def at(self, ns: int) -> float:
        return _micros(self.clock.unix - self.start + (ns - self.clock.monotonic_ns) / 1e9)


def _micros(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 3)


def _rank_events(rank: TraceRank, axis: _Axis, pid: int, tid: int) -> Iterator[Event]:
    drift: int | None = None
    last = int(rank.records[-1]["step"]) if len(rank.records) else 0
    for record, (begin_ns, end_ns) in zip(rank.records, _spans(rank), strict=True):
        begin, end = axis.at(begin_ns), axis.at(end_ns)
        in_flight = int(record["step"]) == last and _in_flight(record)
        yield from _step_events(record, begin, end, axis, pid, tid, in_flight=in_flight)
        if record["phase"] >= Phase.STATE_UPDATED and record["lengths"] == Lengths.OUTPUT_TOKENS:
            value = int(record["drift_max"])
            if value != drift:  # a counter keeps its value until it changes
                drift = value
                yield {
                    "ph": "C",
                    "pid": pid,
                    "tid": tid,
                    "ts": begin,
                    "name": f"drift {rank.label}",
                    "args": {"tokens": value},
                }


def _spans(rank: TraceRank) -> list[tuple[int, int]]:
    """
    Where the slice of each step begins and ends, in nanoseconds of the node's clock.

    It ends when the step was done, or, in flight, when it was last seen. When an error ended a step is not recorded: its
    slice ends with the last thing that is. No slice reaches into the next one, whatever the records say.
    """
    records = rank.records
    begins = np.maximum.accumulate(records["begin_ns"].astype(np.int64))
    last = np.maximum(records["decide_ns"].astype(np.int64), begins)
    ends = np.maximum(records["end_ns"].astype(np.int64), last)
    ends[:-1] = np.minimum(ends[:-1], begins[1:])
    if len(ends) and _in_flight(records[-1]):
        ends[-1] = max(int(ends[-1]), rank.clock.monotonic_ns)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def _in_flight(record: np.void) -> bool:
    return bool(record["phase"] < Phase.DONE and not record["failed"])


def _step_events(
    record: np.void, begin: float, end: float, axis: _Axis, pid: int, tid: int, *, in_flight: bool
) -> Iterator[Event]:
    phase = int(record["phase"])
    name = f"step {int(record['step'])}"
    name += " (failed)" if record["failed"] else " (in flight)" if in_flight else ""
    slice_ = {"ph": "X", "pid": pid, "tid": tid, "cat": "step"}
    args = _step_args(record, in_flight=in_flight)
    yield slice_ | {"ts": begin, "dur": _length(begin, end), "name": name, "args": args}
    decided = int(record["decide_ns"]) if phase >= Phase.DECIDED else 0
    at = min(max(axis.at(decided), begin), end) if decided else end
    before = "scheduled" if phase == Phase.SCHEDULED else "scheduled, state updated"
    yield slice_ | {"ts": begin, "dur": _length(begin, at), "name": before, "args": {}}
    if decided:
        yield slice_ | {"ts": at, "dur": _length(at, end), "name": "decided", "args": {}}
    guard = _guard(record)
    if decided and guard:
        yield {"ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": at, "name": guard, "cat": "decision", "args": _decision_args(record)}  # fmt: skip


def _length(begin: float, end: float) -> float:
    return round(max(0.0, end - begin), 3)


def _guard(record: np.void) -> str:
    return _GUARDS.get(int(record["guard"]), "")


def _step_args(record: np.void, *, in_flight: bool) -> dict[str, Any]:
    phase = int(record["phase"])
    args: dict[str, Any] = {
        "step": int(record["step"]),
        "phase": _PHASES.get(phase, "unknown"),
        "in_flight": in_flight,
        "new": int(record["new"]),
        "cached": int(record["cached"]),
        "finished": int(record["finished"]),
        "scheduled_tokens": int(record["scheduled_tokens"]),
        "drafting": int(record["drafting"]),
        "batch_hash": f"{int(record['batch_hash']):016x}",
    }
    if phase >= Phase.STATE_UPDATED and record["lengths"]:
        args |= {"drift_max": int(record["drift_max"]), "drifting": int(record["drifting"])}
        args["trim_fix"] = _mitigation(int(record["mitigation"]))
    return args


def _mitigation(value: int) -> str:
    return MitigationState(value).label if value in set(MitigationState) else "unknown"


def _decision_args(record: np.void) -> dict[str, Any]:
    masked = f"{int(record['masked'])} of {int(record['requests'])}" if record["mask_known"] else "unknown"
    role = int(record["role"])
    return {
        "step": int(record["step"]),
        "guard": _guard(record),
        "masked": masked,
        "drift_max": int(record["drift_max"]) if record["lengths"] else "unknown",
        "width": int(record["width"]) or "unknown",
        "posted": int(record["posted"]),
        "role": Role(role).name.lower() if role in set(Role) else "unknown",
    }


def _disagreements(ranks: Sequence[TraceRank], axes: Sequence[_Axis], pid: int) -> Iterator[Event]:
    """
    Where ranks of one data-parallel rank said different things about a step: an instant on each, and arrows between them.
    """
    flow = 0
    for dp in sorted({rank.dp_rank for rank in ranks}):
        rows = [row for row, rank in enumerate(ranks) if rank.dp_rank == dp]
        for what, value, known in _WORDS:
            for step in _differing(ranks, rows, value, known):
                points = []
                for row in rows:
                    found = np.flatnonzero(ranks[row].records["step"] == step)
                    if found.size and known(ranks[row].records[found])[0]:
                        record = ranks[row].records[found[0]]
                        ns = int(record["decide_ns"]) if value != "batch_hash" else int(record["begin_ns"])
                        points.append((row + 1, axes[row].at(ns)))
                points.sort(key=lambda point: point[1])
                for tid, ts in points:
                    yield {"ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": ts, "name": f"{what} at step {step}", "cat": "disagreement"}  # fmt: skip
                for (tid, ts), (other, later) in pairwise(points):
                    flow += 1
                    arrow = {"pid": pid, "cat": "disagreement", "name": what, "id": pid * 1_000_000 + flow}
                    yield arrow | {"ph": "s", "tid": tid, "ts": ts}
                    yield arrow | {"ph": "f", "bp": "e", "tid": other, "ts": later}


def _decided(records: Records) -> npt.NDArray[np.bool_]:
    return np.asarray((records["phase"] >= Phase.DECIDED) & (records["guard"] != Guard.NONE))


def _masked(records: Records) -> npt.NDArray[np.bool_]:
    return np.asarray((records["phase"] >= Phase.DECIDED) & (records["mask_known"] == 1))


def _begun(records: Records) -> npt.NDArray[np.bool_]:
    return np.asarray(records["phase"] >= Phase.SCHEDULED)


_WORDS: tuple[tuple[str, str, Known], ...] = (
    ("batch mismatch", "batch_hash", _begun),
    ("mask disagreement", "mask_hash", _masked),
    ("guard disagreement", "guard", _decided),
)


def _differing(ranks: Sequence[TraceRank], rows: Sequence[int], value: str, known: Known) -> list[int]:
    """
    The first steps at which two of the ranks are known to differ.
    """
    steps, values = [], []
    for row in rows:
        records = ranks[row].records
        records = records[known(records)]
        steps.append(records["step"])
        values.append(records[value].astype(np.uint64))
    if len(steps) < 2:
        return []
    all_steps, all_values = np.concatenate(steps), np.concatenate(values)
    order = np.lexsort((all_values, all_steps))
    all_steps, all_values = all_steps[order], all_values[order]
    differs = (all_steps[1:] == all_steps[:-1]) & (all_values[1:] != all_values[:-1])
    return [int(step) for step in np.unique(all_steps[1:][differs])[:DISAGREEMENTS_SHOWN]]
