"""Saved files beside each other: what belongs together, what counts, what is missing, and when copies were made."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from made_ranks import START_UNIX, begin_ns, made_records, made_report
from saved_flights import CREATED_NS, node_unix, write_flight

from rankscope_exporter.contract import RankLife
from rankscope_exporter.flight import compose_flight, layout
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_server.domain.clock import NodeClock
from rankscope_server.domain.model import RankId
from rankscope_server.replay.engines import SavedEngine, group_engines
from rankscope_server.replay.errors import ReplayError
from rankscope_server.replay.places import SavedFile
from rankscope_server.replay.saved import SavedRank, read_saved
from rankscope_server.replay.taken import Taken, taken_by_name, taken_live
from rankscope_server.replay.until import last_unix, parse_until


def saved(path: Path) -> SavedRank:
    """The file, read."""
    return read_saved(SavedFile(path, str(path)))


def grouped(*paths: Path) -> list[SavedEngine]:
    """The engines of these files, of which nothing is known but what is in them."""
    return group_engines([(saved(path), Taken()) for path in paths])


def test_ranks_of_one_engine_stand_together(tmp_path: Path):
    """Files are put to their engines, ranks in order, engines in the order in which they came up."""
    late = write_flight(tmp_path, made_records(1, 3), made_report(engine="b"), created_unix=START_UNIX + 60)
    files = [write_flight(tmp_path, made_records(1, 3), made_report(pp, engine="a")) for pp in (1, 0)]

    engines = grouped(late, *files)

    assert [engine.name for engine in engines] == ["a", "b"]
    assert [rank.label for rank in engines[0].ranks] == ["pp0", "pp1"]
    assert (engines[0].missing, engines[0].notes) == ((), ())


def test_a_rank_that_is_missing_is_named(tmp_path: Path):
    """Of two pipeline ranks one file is there: the other is named, and nothing is said to agree."""
    (engine,) = grouped(write_flight(tmp_path, made_records(1, 3), made_report(1)))

    assert engine.missing == (RankId(0, 0, 0),)
    assert engine.notes == (
        "no file of pp0 of 2 ranks is here: pp1 is looked at alone, and nothing can be compared with it",
    )


def test_several_ranks_that_are_missing(tmp_path: Path):
    """With tensor-parallel ranks both indices are named."""
    files = [write_flight(tmp_path, made_records(1, 3), made_report(pp, tp_rank=0, tp_size=2)) for pp in (0, 1)]

    (engine,) = grouped(*files)

    assert engine.notes == ("no file of pp0 tp1 and pp1 tp1 of 4 ranks is here: pp0 and pp1 are compared without them",)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"created_unix": START_UNIX + 60, "report": made_report(pid=9)},
            "it is of an earlier run of the rank that wrote",
        ),
        ({"records": made_records(1, 9)}, "is a newer copy of the same file"),
    ],
)
def test_the_newest_file_of_a_rank_counts(tmp_path: Path, change: dict[str, object], why: str):
    """Of two files of one rank the newest counts, in whichever order they come, and the other is named."""
    old = write_flight(tmp_path, made_records(1, 3), name="old.flight")
    new = write_flight(tmp_path, **({"records": made_records(1, 3), "name": "new.flight"} | change))

    for files in ((old, new), (new, old)):
        (engine,) = grouped(*files)
        assert [rank.saved.file.path for rank in engine.ranks] == [new]
        assert engine.notes[0].startswith(f"{old} is left out: ")
        assert why in engine.notes[0]


def test_wall_clocks_that_disagree_are_put_right(tmp_path: Path):
    """A node whose wall clock is a minute ahead began the same steps at the same time: its times are shifted, and it is said."""
    ahead = made_report(1, host="node-b")
    files = [
        write_flight(tmp_path, made_records(1, 50)),
        write_flight(tmp_path, made_records(1, 50), ahead, created_unix=START_UNIX + 60),
    ]

    (engine,) = grouped(*files)

    first, second = engine.ranks
    assert first.unix_ns(begin_ns(9)) == pytest.approx(second.unix_ns(begin_ns(9)), abs=1e6)
    assert second.node_ns(second.unix_ns(begin_ns(9))) == begin_ns(9)
    assert engine.notes == (
        "the wall clock of pp1's node (node-b) was 60.0 s ahead of that of pp0's (node-a): times are pp0's",
    )


def test_ranks_that_lag_are_not_shifted(tmp_path: Path):
    """Ranks that begin a step a second apart are as they are in good health."""
    files = [
        write_flight(tmp_path, made_records(1, 50)),
        write_flight(tmp_path, made_records(1, 50), made_report(1), created_unix=START_UNIX + 1),
    ]

    (engine,) = grouped(*files)

    assert [rank.shift_ns for rank in engine.ranks] == [0, 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes are too few for a flight file"),
        (bytes(30_000), "not a flight file"),
        (b"RANKSCPE" + (99).to_bytes(4, "little") + bytes(30_000), "flight file version 99 is newer than this reader"),
    ],
)
def test_what_is_no_flight_file_is_told(tmp_path: Path, content: bytes, said: str):
    """The name that was given, and what is wrong with the file."""
    path = tmp_path / "x.flight"
    path.write_bytes(content)

    with pytest.raises(ReplayError, match=said) as failure:
        saved(path)
    assert str(failure.value).startswith(f"{path}: ")


def test_an_identity_that_says_too_little(tmp_path: Path):
    """A file that does not say whose it is cannot be put to an engine; the field that is missing is named."""
    path = tmp_path / "x.flight"
    path.write_bytes(compose_flight({"engine": "e"}, {}, made_records(1, 2), created_unix=1.0, created_monotonic_ns=1))

    with pytest.raises(ReplayError, match=r"does not say whose it is, .*: dp_rank: Field required"):
        saved(path)


def test_when_a_copy_was_made_by_its_name(tmp_path: Path):
    """Copies of `rankscope-exporter copy` have the time in their name; other names say nothing."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(START_UNIX + 30))
    copy = saved(write_flight(tmp_path, made_records(1, 3), name=f"e1-dp0-pp0-tp0-4000.{moment}-2.flight"))
    plain = saved(write_flight(tmp_path, made_records(1, 3)))
    odd = saved(write_flight(tmp_path, made_records(1, 3), name="e1.99999999T999999Z.flight"))

    assert taken_by_name(copy) == Taken(CREATED_NS + 30_000_000_000)
    assert (taken_by_name(plain), taken_by_name(odd)) == (None, None)


def test_a_file_that_a_process_is_writing_speaks_of_now(tmp_path: Path):
    """Only the very file that a living process has mapped is live: a copy of it stands still while the process goes on."""
    writer = FlightWriter(tmp_path / "live", "e1", made_report(pid=os.getpid()).identity.model_dump(mode="json"))
    copied = tmp_path / "copied" / "e1.flight"
    copied.parent.mkdir()
    copied.write_bytes(writer.path.read_bytes())
    clock = NodeClock(7_000, START_UNIX, 1.0)

    assert taken_live(saved(writer.path), clock) == Taken(7_000, RankLife.RUNNING)
    assert taken_live(saved(copied), clock) is None
    assert taken_live(saved(write_flight(tmp_path, made_records(1, 2))), clock) is None
    del writer


def test_what_a_file_says_of_its_rank_at_the_end(tmp_path: Path):
    """Control words, the fix after the last action, a failed step and the request table come out of the file."""
    word = layout.encode_control(1, 3, 5, desired=True)
    words = [0] * 13
    words[layout.CONTROL_REQUEST] = words[layout.ACK_OBSERVED] = words[layout.ACK_WORD] = word
    words[layout.ACK_STEP], words[layout.ACK_OUTCOME], words[layout.ACK_STATE] = 5, 2, 2
    records = made_records(1, 9)
    records["failed"][-1], records["phase"][-1] = 1, 3
    row = (9, 4, 30, 20, 10, -4, 1, 2, b"r1")
    path = write_flight(tmp_path, records, control=words, table=[row], drifting=1, faults=2)

    rank = saved(path)

    assert (rank.report.control.acted_step, rank.report.mitigations[0].state.name) == (5, "APPLIED")
    assert (rank.report.failure.step, rank.report.failure.kind) == (9, "unknown")
    assert (rank.requests.drifting, rank.requests.rows[0].request_id, rank.requests.rows[0].drift) == (1, "r1", 10)
    assert rank.report.faults == 2


@pytest.mark.parametrize(
    ("text", "unix"),
    [
        ("+30", None),
        ("+1.5s", None),
        ("1780000000", 1_780_000_000.0),
        ("2026-05-28T20:26:40Z", 1_780_000_000.0),
        ("2026-05-28T22:26:40+02:00", 1_780_000_000.0),
        ("2026-05-28 20:26:40", 1_780_000_000.0),
    ],
)
def test_how_far_to_go(tmp_path: Path, text: str, unix: float | None):
    """A moment in several ways of writing it, or a time after the last thing that the engine did."""
    (engine,) = grouped(write_flight(tmp_path, made_records(1, 3)))
    last = node_unix(begin_ns(3) + 15_000_000)

    until = parse_until(text)

    assert until.of(engine) == pytest.approx(last + float(text.strip("+s")) if unix is None else unix)
    assert last_unix(engine) == pytest.approx(last)


@pytest.mark.parametrize("text", ["soon", "30", "+", "2026-13-01", "-5", "9999-01-01", "1900-01-01", "99999999999"])
def test_how_far_to_go_in_no_known_way(text: str):
    """What is no time is an error that shows how to write one."""
    with pytest.raises(ReplayError, match=r"write 2026-12-01T14:03:00Z"):
        parse_until(text)


def test_an_engine_without_records(tmp_path: Path):
    """An engine that began no step ends when its file was made."""
    (engine,) = grouped(write_flight(tmp_path, np.zeros(0, layout.STEP_DTYPE)))

    assert last_unix(engine) == pytest.approx(START_UNIX)


@pytest.mark.parametrize("clocks", [{"created_unix": 9e9}, {"created_unix": 0.0}, {"created_monotonic_ns": 1 << 62}])
def test_a_file_whose_clocks_make_no_sense(tmp_path: Path, clocks: dict[str, float]):
    """Nothing in it could be dated, so it is not replayed."""
    with pytest.raises(ReplayError, match="and that makes no sense: the file is damaged"):
        saved(write_flight(tmp_path, made_records(1, 3), **clocks))
