"""
Flight files made of values: what goes in comes out through the reader.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_exporter.contract import ControlOutcome, Detail, Guard, MitigationState, Phase
from rankscope_exporter.flight import FlightFile, compose_flight, layout, whole_copy
from rankscope_exporter.flight.reader import MAX_RING_CAPACITY

IDENTITY = {"engine": "e1", "dp_rank": 0, "pp_rank": 1, "tp_rank": 0}
REPORT = {"hooks": [{"hook": "execute_model", "state": "on", "reason": ""}], "mitigations": [], "failure": None}
CLOCKS = {"created_unix": 1_780_000_000.25, "created_monotonic_ns": 5_000_000_000}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def opened(content: bytes, directory: Path) -> FlightFile:
    """The reader over a file of these bytes."""
    path = directory / "rank.flight"
    path.write_bytes(content)
    return FlightFile(path)


def made_records(*steps: int, phase: Phase = Phase.DONE, **fields: int) -> np.ndarray:
    """Records of these steps with something in every part that `phase` has."""
    records = np.zeros(len(steps), layout.STEP_DTYPE)
    records["step"] = steps
    records["batch_hash"] = [step * 7 for step in steps]
    records["begin_ns"] = [step * 1000 for step in steps]
    if phase >= Phase.STATE_UPDATED:
        records["state_sum"], records["lengths"] = 30, 1
    if phase >= Phase.DECIDED:
        records["guard"], records["requests"] = Guard.BROADCAST, 2
    if phase >= Phase.DONE:
        records["end_ns"] = [step * 1000 + 500 for step in steps]
    records["phase"] = phase
    for name, value in fields.items():
        records[name] = value
    return records


@st.composite
def step_records(draw: st.DrawFn) -> np.ndarray:
    """Records of any steps, with holes, in any order, in any phases, with any numbers in the parts that they have."""
    steps = draw(st.lists(st.integers(1, 400), unique=True, max_size=60))
    offset = draw(st.sampled_from([0, 2**32, 2**40 - 401]))
    raw = np.frombuffer(
        draw(
            st.binary(
                min_size=layout.STEP_DTYPE.itemsize * len(steps), max_size=layout.STEP_DTYPE.itemsize * len(steps)
            )
        ),
        np.uint8,
    ).reshape(len(steps), layout.STEP_DTYPE.itemsize)
    raw = raw.copy()
    ends = {
        Phase.SCHEDULED: layout.PART_STATE_OFFSET,
        Phase.STATE_UPDATED: layout.PART_DECIDED_OFFSET,
        Phase.DECIDED: layout.PART_DONE_OFFSET,
        Phase.DONE: layout.FAILED_OFFSET,
    }
    phases = [draw(st.sampled_from(list(ends))) for _ in steps]
    for row, phase in enumerate(phases):
        raw[row, ends[phase] : layout.FAILED_OFFSET] = 0
    records = raw.view(layout.STEP_DTYPE).reshape(-1)
    records["step"], records["phase"] = [step + offset for step in steps], phases
    records["failed"] %= 2
    return records


@st.composite
def request_rows(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Rows of a request table as a rank writes them."""
    u32, i32 = st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1)
    rows = []
    for _ in range(draw(st.integers(0, layout.TABLE_CAPACITY + 3))):
        name = draw(st.text(max_size=20)).encode()[: layout.REQUEST_ID_BYTES]
        step, first = draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40))
        rows.append((step, first, draw(u32), draw(u32), draw(i32), draw(i32), draw(st.integers(0, 1)), len(name), name))
    return rows


@settings(max_examples=60, deadline=None)
@given(
    identity=st.dictionaries(st.text(max_size=8), json_values, max_size=6),
    hooks=st.lists(json_values, max_size=4),
    records=step_records(),
    table=request_rows(),
    drifting=st.integers(0, 2**32 - 1),
    words=st.lists(st.integers(0, 2**64 - 1), max_size=16),
    faults=st.integers(0, 2**64 - 1),
    detail=st.sampled_from(Detail),
    created=st.integers(0, 2**62),
    monotonic=st.integers(0, 2**63 - 1),
    process=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)),
    spare=st.none() | st.integers(0, 50),
)
def test_what_goes_in_comes_out(
    identity: dict[str, Any],
    hooks: list[Any],
    records: np.ndarray,
    table: list[tuple[Any, ...]],
    drifting: int,
    words: list[int],
    faults: int,
    detail: Detail,
    created: int,
    monotonic: int,
    process: tuple[int, int],
    spare: int | None,
) -> None:
    """Every value is what the reader gives, whatever it is; records come in the order of their steps."""
    span = int(records["step"].max() - records["step"].min()) + 1 if len(records) else 1
    report = {"hooks": hooks, "mitigations": [], "failure": None}
    content = compose_flight(
        identity, report, records, created_unix=created / 1e9, created_monotonic_ns=monotonic, pid=process[0],
        process_start_ticks=process[1], table=table, drifting=drifting, control=words, faults=faults, detail=detail,
        capacity=None if spare is None else span + spare,
    )  # fmt: skip

    with tempfile.TemporaryDirectory() as directory, opened(content, Path(directory)) as flight:
        assert flight.identity() == identity
        assert flight.report() == report
        assert flight.ring_capacity == span + (spare or 0)
        assert flight.records().tobytes() == records[records["step"].argsort()].tobytes()
        assert flight.step() == (int(records["step"].max()) if len(records) else 0)
        assert flight.words()[: len(words)] == tuple(words)
        assert (flight.faults(), flight.detail()) == (faults, detail)
        assert (flight.pid, flight.process_start_ticks) == process
        assert flight.created_unix == pytest.approx(created / 1e9)
        assert flight.created_monotonic_ns == monotonic
        kept = table[: layout.TABLE_CAPACITY]
        known, rows = flight.requests()
        assert known == drifting
        assert [(row.step, row.first_drift_step, row.state_length, row.scheduler_length, row.drift) for row in rows] == [row[:5] for row in kept]  # fmt: skip
        assert [row.request_id for row in rows] == [row[8].decode(errors="replace") for row in kept]
        failed = records["step"][records["failed"] > 0].tolist()
        assert flight.failed_steps() == (len(failed), max(failed, default=0))
        assert whole_copy(flight) == content


def test_device_lengths(tmp_path: Path) -> None:
    """A sample of device-side lengths comes out as it was named; without one there is none."""
    sample = {"every": 64, "samples": 3, "step": 128, "taken_ns": 9_000, "rows": 4, "total_excess": 7}

    with opened(compose_flight(IDENTITY, REPORT, made_records(), device=sample, **CLOCKS), tmp_path) as flight:
        told = flight.device_lengths()
        assert told is not None
        assert {name: int(told[name]) for name in sample} == sample
        assert int(told["excess_rows"]) == 0
    with opened(compose_flight(IDENTITY, REPORT, made_records(), **CLOCKS), tmp_path) as flight:
        assert flight.device_lengths() is None


def test_control_words(tmp_path: Path) -> None:
    """Control words stand by their index, so that a file tells what its rank did with the last command."""
    word = layout.encode_control(1, 7, 400, desired=True)
    words = [0] * 13
    words[layout.CONTROL_REQUEST] = words[layout.ACK_OBSERVED] = words[layout.ACK_WORD] = word
    words[layout.ACK_STEP], words[layout.ACK_OUTCOME] = 400, ControlOutcome.APPLIED
    words[layout.ACK_STATE] = MitigationState.APPLIED

    with opened(compose_flight(IDENTITY, REPORT, made_records(), control=words, **CLOCKS), tmp_path) as flight:
        control = flight.control()

    assert (control.requested_word, control.acted_step) == (word, 400)
    assert (control.outcome, control.mitigation_state) == (ControlOutcome.APPLIED, MitigationState.APPLIED)


def test_a_step_in_flight(tmp_path: Path) -> None:
    """A last record that is not done is of a step in flight, and what lies beyond its phase is not there."""
    records = np.concatenate([made_records(1, 2), made_records(3, phase=Phase.DECIDED)])

    with opened(compose_flight(IDENTITY, REPORT, records, **CLOCKS), tmp_path) as flight:
        last = flight.records()[-1]

    assert (int(last["step"]), int(last["phase"]), int(last["end_ns"])) == (3, Phase.DECIDED, 0)


def test_a_failed_step_that_only_the_report_knows(tmp_path: Path) -> None:
    """A failed step counts also where its record is gone."""
    report = REPORT | {"failure": {"step": 3, "phase": 2, "method": "execute_model", "kind": "ValueError"}}

    with opened(compose_flight(IDENTITY, report, made_records(8, 9), **CLOCKS), tmp_path) as flight:
        assert flight.failed_steps() == (1, 3)


def test_a_ring_that_is_too_small(tmp_path: Path) -> None:
    """A ring that is given keeps the newest steps, as a rank's does."""
    with opened(compose_flight(IDENTITY, REPORT, made_records(*range(1, 101)), capacity=64, **CLOCKS), tmp_path) as f:
        assert f.records()["step"].tolist() == list(range(37, 101))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identity": {"model": "x" * 5000}}, "bytes of JSON do not fit into 3828"),
        ({"records": made_records(0, 1)}, "steps are counted from 1"),
        ({"records": made_records(1, 1 + MAX_RING_CAPACITY)}, "it can have 1 to 1048576"),
        ({"capacity": 0}, "it can have 1 to 1048576"),
        ({"control": [0] * 17}, "17 words do not fit"),
        ({"faults": -1}, "a word does not hold"),
        ({"pid": 1 << 32}, "the header does not hold"),
        ({"table": [(0, 0, 0, 0, 1 << 40, 0, 0, 0, b"")]}, "row 0 of the request table does not hold"),
        ({"device": {"rows": 1 << 40}}, "the area of device lengths does not hold"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    """A value that has no room is an error that names it, never a file that says something else."""
    arguments: dict[str, Any] = {"identity": IDENTITY, "report": REPORT, "records": made_records(1), **CLOCKS}

    with pytest.raises(ValueError, match=said):
        compose_flight(**(arguments | changes))
