"""Frozen copies of flight records: what goes in comes out, and nothing harmful gets in."""

import contextlib
import io
import json
import zipfile

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ranks import (
    START_UNIX,
    ManualClock,
    made_control,
    made_device,
    made_engine,
    made_rank,
    made_records,
    made_report,
)
from made_ranks import made_record as record

from rankscope_exporter.contract import MitigationState, Phase, RankLife, RequestRow, RequestTable, StepFailure
from rankscope_exporter.flight import FlightError
from rankscope_server.domain.clock import NodeClock
from rankscope_server.domain.facts import plain_url
from rankscope_server.domain.incident import IncidentLife
from rankscope_server.domain.model import Evidence, Finding, FindingKind, RankId, RankValue, Severity
from rankscope_server.incidents.capture import STEPS_KEPT, CaptureSubject, make_capture
from rankscope_server.incidents.manifest import CaptureError, file_name, parse_manifest
from rankscope_server.incidents.reading import CaptureFile

pytestmark = pytest.mark.anyio

PP0 = RankId(0, 0, 0)
FOUND = Finding(
    FindingKind.DRIFT,
    Severity.WARNING,
    "drift",
    7,
    (PP0,),
    START_UNIX,
    evidence=Evidence((RankValue(PP0, "pp0", "+3"),)),
)


def subject(*ranks, now, **engine):
    return CaptureSubject(
        made_engine(*ranks, now=now, **engine), "i-1", IncidentLife.WORSENING, "Drift began.", (FOUND,)
    )


@pytest.fixture
def now():
    return ManualClock().now()


async def test_what_is_copied_can_be_read_again(now):
    """Records, identity, report, control, requests, device sample and clocks of each rank, through the reader of flight files."""
    report = made_report(
        0,
        trim=MitigationState.APPLIED,
        trim_reason="so",
        control=made_control(3, acted_step=12, effective_step=11),
        failure=StepFailure(step=40, phase=2, method="execute_model", kind="ValueError"),
        device=made_device(2, step=32),
        faults=2,
    )
    records = np.concatenate([made_records(1, 39), record(40, Phase.STATE_UPDATED, failed=1)])
    rank = made_rank(records, report, now=now, quiet=2.0)
    row = RequestRow(
        request_id="r-1", state_length=9, scheduler_length=6, drift=3, masked=True, margin=None, first_drift_step=7, step=40
    )  # fmt: skip
    table = RequestTable(key=report.key, engine="e1", dp_rank=0, pp_rank=0, tp_rank=0, drifting=4, rows=[row])
    object.__setattr__(rank, "requests", table)
    other = made_rank(made_records(1, 38), made_report(1, life=RankLife.STOPPED), now=now)
    made = await make_capture(subject(rank, other, now=now), now)
    capture = CaptureFile(made.data)

    assert (made.view.ranks, made.view.first_step, made.view.last_step) == (2, 1, 40)
    assert (made.view.size_bytes, made.view.at_unix) == (len(made.data), now.unix)
    flights = {}
    for described, flight in capture.flights():
        flights[described.label] = described
        whole = records if described.pp_rank == 0 else made_records(1, 38)
        assert flight.records().tobytes() == whole.tobytes()
        assert flight.identity()["pp_rank"] == described.pp_rank
        if described.pp_rank == 0:
            drifting, rows = flight.requests()
            assert (drifting, rows[0].request_id, rows[0].margin, rows[0].masked) == (4, "r-1", None, True)
            assert flight.report()["failure"]["kind"] == "ValueError"
            assert flight.report()["mitigations"] == [{"mitigation": "trim", "state": 2, "reason": "so"}]
            control = flight.control()
            assert (control.acted_step, control.mitigation_state) == (12, MitigationState.APPLIED)
            assert (flight.device_lengths()["total_excess"], flight.device_lengths()["step"]) == (2, 32)
            assert flight.faults() == 2
        first = int(whole["begin_ns"][0])
        assert flight.wall_time(first) == pytest.approx(START_UNIX + first / 1e9)
    assert flights["pp0"].clock.monotonic_ns == rank.clock.monotonic_ns
    assert (flights["pp1"].life, flights["pp1"].last_step) == (RankLife.STOPPED, 38)
    manifest = capture.manifest
    assert (manifest.deployment, manifest.engine, manifest.incident) == ("chat", "e1", "i-1")
    assert (manifest.life, manifest.captured_unix) == (IncidentLife.WORSENING, now.unix)
    assert manifest.findings[0]["evidence"]["values"][0]["value"] == "+3"


async def test_the_newest_steps_are_kept(now):
    """As many as a capture holds."""
    rank = made_rank(made_records(1, 10), now=now)
    rank.history.__init__(4096)
    rank.history.absorb(made_records(1, STEPS_KEPT + 50))
    made = await make_capture(subject(rank, now=now), now)
    ((described, flight),) = [(d, f.records()) for d, f in CaptureFile(made.data).flights()]

    assert (described.first_step, described.last_step, len(flight)) == (51, STEPS_KEPT + 50, STEPS_KEPT)


async def test_a_rank_without_steps_is_copied_too(now):
    """Who it is and what its hooks say is evidence."""
    made = await make_capture(subject(made_rank(made_records(1, 0), now=now), now=now), now)

    assert (made.view.ranks, made.view.last_step) == (1, 0)
    assert [len(flight.records()) for _, flight in CaptureFile(made.data).flights()] == [0]


async def test_what_does_not_fit_is_named_and_the_rest_is_copied(now):
    """A rank whose identity is longer than a flight file has room for."""
    large = made_rank(made_records(1, 5), made_report(0, model="m" * 9000), now=now)
    made = await make_capture(subject(large, made_rank(made_records(1, 5), made_report(1), now=now), now=now), now)
    manifest = CaptureFile(made.data).manifest

    assert [bool(rank.file) for rank in manifest.ranks] == [False, True]
    assert "do not fit" in manifest.ranks[0].problem
    assert made.view.ranks == 1


async def test_exporters_out_of_reach_and_missing_ranks_are_named(now):
    """Without the password that may stand in an address."""
    rank = made_rank(made_records(1, 5), made_report(0), now=now)
    made = await make_capture(subject(rank, now=now, answered=now.monotonic - 60, error="refused"), now)
    manifest = CaptureFile(made.data).manifest

    assert (manifest.missing_ranks, manifest.missing_exporters[0].error) == (1, "refused")
    assert plain_url("https://ada:secret@a:9610/x") == "https://a:9610/x"


async def test_a_clock_that_was_set_keeps_records_datable(now):
    """The flight file was made before its first record, whatever the wall clock said since."""
    rank = made_rank(made_records(1, 5), made_report(0, started_unix=START_UNIX + 9_000), now=now)
    made = await make_capture(subject(rank, now=now), now)
    ((times),) = [
        [flight.wall_time(int(ns)) for ns in flight.records()["begin_ns"]]
        for _, flight in CaptureFile(made.data).flights()
    ]

    assert times[0] == pytest.approx(START_UNIX + 1.02)


async def test_a_clock_that_is_none_spoils_one_rank_only(now):
    """An exporter that answers nonsense: its rank is named with the reason, and the capture can be read."""
    broken = made_rank(made_records(1, 5), made_report(0), now=now)
    object.__setattr__(broken, "clock", NodeClock(5, float("nan"), now.monotonic))
    made = await make_capture(subject(broken, made_rank(made_records(1, 5), made_report(1), now=now), now=now), now)
    manifest = CaptureFile(made.data).manifest

    assert [bool(rank.problem) for rank in manifest.ranks] == [True, False]
    assert manifest.ranks[0].clock.unix == 0.0


WHOLE = anyio.run(
    make_capture,
    subject(made_rank(made_records(1, 9), now=ManualClock().now()), now=ManualClock().now()),
    ManualClock().now(),
).data


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=6), st.integers(0, len(WHOLE)))
def test_a_damaged_capture_is_refused_or_read(changes, length):
    """Bytes that were turned, an end that is missing: an error of ours, or what is still whole."""
    data = bytearray(WHOLE)
    for at, value in changes:
        data[at] = value
    with contextlib.suppress(CaptureError):
        for _, flight in CaptureFile(bytes(data[: length or None])).flights():
            with contextlib.suppress(FlightError):
                flight.records()


def test_a_zip_that_lies_about_its_places_is_refused():
    """Offsets that lead in front of the file."""
    data = bytearray(WHOLE)
    data[-6:-2] = (len(data) * 2).to_bytes(4, "little")
    with pytest.raises(CaptureError):
        list(CaptureFile(bytes(data)).flights())


@pytest.mark.parametrize("key", ["../../etc/passwd", "/abs", "..", "a b", "", "x" * 500, "C:\\x", "\0"])
def test_names_in_a_capture_are_harmless(key):
    """Keys come from exporters: whatever they are, files stay in one folder."""
    first = file_name(key, set())
    second = file_name(key, {first})

    assert first != second
    for name in (first, second):
        assert name.endswith(".flight")
        assert not name.startswith(".")
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def manifest_json(**changes):
    rank = {
        "file": "a.flight", "key": "a", "label": "pp0", "dp_rank": 0, "pp_rank": 0, "tp_rank": 0, "life": "running",
        "clock": {"monotonic_ns": 1, "unix": 1.0}, "age_seconds": 0.0, "exporter": "http://a", "first_step": 1, "last_step": 2,
    }  # fmt: skip
    ranks = [rank | changes.pop("rank", {})]
    return json.dumps(
        {
            "format": 1, "deployment": "chat", "engine": "e1", "incident": "i-1", "life": "open", "captured_unix": 1.0, "sentence": "",
            "ranks": ranks, "missing_ranks": 0, "missing_exporters": [], "findings": [],
        }
        | changes
    ).encode()  # fmt: skip


def zipped(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("_", "."), data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{}", "damaged: format: Field required"),
        (b"no json", "damaged"),
        (manifest_json(format=2), "format 2, and this server reads format 1"),
        (manifest_json(rank={"file": "../a.flight"}), "cannot have"),
        (manifest_json(rank={"file": "a.txt"}), "cannot have"),
        (manifest_json(rank={"clock": {"monotonic_ns": -1, "unix": 1.0}}), "monotonic_ns"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(raw, reason):
    """With the reason."""
    with pytest.raises(CaptureError, match=reason):
        parse_manifest(raw)


def test_files_that_are_named_twice_are_refused():
    """Two ranks with one file."""
    twice = json.loads(manifest_json())
    twice["ranks"] *= 2
    with pytest.raises(CaptureError, match="cannot have"):
        parse_manifest(json.dumps(twice).encode())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no zip", "not a capture"),
        (zipped(a_flight=b"x"), "it has no capture.json"),
        (zipped(capture_json=b"{" + b" " * (17 << 20) + b"}"), "more than"),
    ],
)
def test_a_zip_that_is_no_capture_is_refused(data, reason):
    """With the reason, and without unpacking more than there may be."""
    with pytest.raises(CaptureError, match=reason):
        CaptureFile(data)


def test_flight_files_that_are_none_are_refused():
    """Missing, too large, damaged."""
    with pytest.raises(CaptureError, match=r"it has no a\.flight"):
        list(CaptureFile(zipped(capture_json=manifest_json())).flights())
    with pytest.raises(CaptureError, match="more than"):
        list(CaptureFile(zipped(capture_json=manifest_json(), a_flight=b"\0" * (20 << 20))).flights())
    with pytest.raises(CaptureError, match="cannot be read"):
        list(CaptureFile(zipped(capture_json=manifest_json(), a_flight=b"none")).flights())
    broken = bytearray(zipped(capture_json=manifest_json(), a_flight=bytes(range(256)) * 40))
    at = broken.find(b"a.flight") + 30
    broken[at : at + 20] = b"\xff" * 20
    with pytest.raises(CaptureError, match=r"damaged|not a capture"):
        list(CaptureFile(bytes(broken)).flights())
