"""A replay says what the live server would have said, when it would have, and never more than the files tell."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ranks import START_UNIX, begin_ns, made_device, made_record, made_records, made_report, made_v2_report
from saved_flights import CREATED_NS, LAST, node_unix, write_flight, write_wedge

from rankscope_exporter.contract import HookReport, HookState, Phase, RankLife, StepFailure
from rankscope_exporter.flight import layout
from rankscope_server.domain.clock import NodeClock
from rankscope_server.domain.model import FindingKind
from rankscope_server.replay.document import engine_document
from rankscope_server.replay.engines import group_engines
from rankscope_server.replay.places import SavedFile
from rankscope_server.replay.playing import Found, Played, play
from rankscope_server.replay.run import replay
from rankscope_server.replay.saved import read_saved
from rankscope_server.replay.steps import extract_step
from rankscope_server.replay.taken import Taken
from rankscope_server.replay.text import engine_lines
from rankscope_server.replay.trace import trace_replayed
from rankscope_server.replay.until import Until
from rankscope_server.replay.verdict import Verdict, assess_played


def played(*files: Path, taken: Taken | None = None, until_unix: float | None = None) -> Played:
    """The replay of one engine's files, all copied at the same time."""
    saved = [(read_saved(SavedFile(path, str(path))), taken or Taken()) for path in files]
    (engine,) = group_engines(saved)
    return play(engine, until_unix=until_unix)


def verdict(answer: Played, **options: Any) -> Verdict:
    """What is to be said about it."""
    return assess_played(answer, **options)


def of_kind(answer: Played, kind: FindingKind) -> Found | None:
    """The first finding of a kind."""
    return next((found for found in answer.found if found.finding.kind is kind), None)


def test_healthy_ranks(tmp_path: Path):
    """Nothing is found, and it is said up to which step they agree."""
    files = [write_flight(tmp_path, made_records(1, LAST), made_report(pp)) for pp in (0, 1)]

    answer = played(*files)

    assert answer.found == ()
    assert verdict(answer).sentence == f"Nothing found: pp0 and pp1 agree up to step {LAST}."


def test_a_wedge_from_the_first_drift_to_the_end(tmp_path: Path):
    """Each finding at its step, found within a look after its evidence was there, in order of cause."""
    at_end = CREATED_NS + 60_000_000_000

    answer = played(*write_wedge(tmp_path), taken=Taken(at_end, RankLife.RUNNING))

    told = verdict(answer)
    assert [(found.finding.kind, found.finding.step) for found in told.found] == [
        (FindingKind.DRIFT, 20),
        (FindingKind.MASK_DISAGREEMENT, 30),
        (FindingKind.GUARD_DISAGREEMENT, 40),
        (FindingKind.WEDGED, 40),
    ]
    decided = {20: begin_ns(21), 30: begin_ns(30) + 10_000_000, 40: begin_ns(40) + 10_000_000}
    for found in told.found[:3]:
        assert 0 <= found.found_unix - node_unix(decided[found.finding.step]) <= 0.3
    assert 3.0 <= told.found[3].found_unix - node_unix(begin_ns(41)) <= 3.6
    assert answer.ended.unix == pytest.approx(node_unix(at_end))
    assert told.first_drift_unix == pytest.approx(node_unix(begin_ns(20)))
    assert "pp0 stopped receiving at step 40" in told.sentence
    assert "wedged until it is restarted" in told.sentence
    assert told.notes == ()


def test_a_copy_that_does_not_say_when_it_was_made(tmp_path: Path):
    """The ranks have parted, but whether they hang is not known: no wedge is claimed, and it is said how to tell."""
    answer = played(*write_wedge(tmp_path))

    assert of_kind(answer, FindingKind.GUARD_DISAGREEMENT) is not None
    assert of_kind(answer, FindingKind.WEDGED) is None
    undated, lives = verdict(answer).notes
    assert undated == (
        "the copy of pp0 and pp1 does not say when it was made: whether steps 40 and 41 hung or were just under way is unknown; "
        "--until TIME tells"
    )
    assert lives == "whether the processes of pp0 and pp1 lived is not known: nothing that is here tells"


def test_somebody_vouches_for_the_time_that_passed(tmp_path: Path):
    """With an end that is given, a silence up to it is a wedge, and what a copy does not say no longer matters."""
    answer = played(*write_wedge(tmp_path), until_unix=node_unix(begin_ns(41)) + 10)

    assert of_kind(answer, FindingKind.WEDGED) is not None
    assert not any("--until" in note for note in verdict(answer, until_given=True).notes)


def test_an_end_in_the_middle(tmp_path: Path):
    """An end before the last records leaves out what came after it."""
    answer = played(*write_wedge(tmp_path), until_unix=node_unix(begin_ns(25)))

    assert {found.finding.kind for found in answer.found} == {FindingKind.DRIFT}
    assert max(rank.history.last for rank in answer.facts.ranks) == 25


def test_a_stall_without_a_disagreement(tmp_path: Path):
    """Ranks that hang at the same step are stalled, frozen equal, and nothing says that they have parted."""
    records = np.concatenate([made_records(1, LAST), made_record(LAST + 1, Phase.STATE_UPDATED)])
    files = [write_flight(tmp_path, records, made_report(pp)) for pp in (0, 1)]

    answer = played(*files, taken=Taken(begin_ns(LAST) + 40_000_000_000, RankLife.RUNNING))

    (found,) = answer.found
    assert (found.finding.kind, found.finding.step) == (FindingKind.STALLED, LAST + 1)
    assert 10 <= found.found_unix - node_unix(begin_ns(LAST + 1)) <= 10.6


def test_a_process_that_was_gone_when_the_copy_was_made(tmp_path: Path):
    """A rank that died while its peer waits is lost, not stalled: found right after the last thing that it did."""
    dead = write_flight(tmp_path, made_records(1, LAST), made_report(0))
    waiting = np.concatenate([made_records(1, LAST), made_record(LAST + 1, Phase.DECIDED)])
    alive = write_flight(tmp_path, waiting, made_report(1))
    end = begin_ns(LAST) + 60_000_000_000
    ranks = [
        (read_saved(SavedFile(path, str(path))), Taken(end, life))
        for path, life in ((dead, RankLife.GONE), (alive, RankLife.RUNNING))
    ]

    answer = play(group_engines(ranks)[0])

    (found,) = answer.found
    assert found.finding.kind is FindingKind.RANK_LOST
    assert found.finding.ranks == (answer.facts.ranks[0].id,)
    assert found.found_unix - node_unix(begin_ns(LAST)) < 4


def test_processes_that_were_ended_because_of_a_wedge(tmp_path: Path):
    """Where ranks had parted, a process that was gone when the copy was made is not taken for the cause."""
    end = begin_ns(LAST) + 60_000_000_000

    answer = played(*write_wedge(tmp_path), taken=Taken(end, RankLife.GONE))

    assert of_kind(answer, FindingKind.WEDGED) is not None
    assert of_kind(answer, FindingKind.RANK_LOST) is None
    assert verdict(answer).notes == ("the processes of pp0 and pp1 had ended by the time the copy was made",)


def test_a_step_that_failed(tmp_path: Path):
    """A rank whose step ended in an error of vLLM is lost from that moment on, and how it came about is told."""
    failing = np.concatenate([made_records(1, LAST), made_record(LAST + 1, Phase.STATE_UPDATED, failed=1)])
    failure = StepFailure(step=LAST + 1, phase=2, method="execute_model", kind="RuntimeError")
    waiting = np.concatenate([made_records(1, LAST), made_record(LAST + 1, Phase.DECIDED)])
    files = [
        write_flight(tmp_path, failing, made_report(0, failure=failure)),
        write_flight(tmp_path, waiting, made_report(1)),
    ]

    found = of_kind(played(*files), FindingKind.RANK_LOST)

    assert found is not None
    assert found.finding.step == LAST + 1
    assert "RuntimeError" in found.finding.sentence
    assert found.found_unix - node_unix(begin_ns(LAST + 1)) <= 0.5


def test_nothing_is_blind_for_being_a_file(tmp_path: Path):
    """No exporter answers for a file, and nothing is known of processes: neither is held against the ranks, even for long."""
    files = [write_flight(tmp_path, made_records(1, 3000), made_report(0))]

    answer = played(*files, taken=Taken(begin_ns(3000) + 10**12, RankLife.UNKNOWN))

    assert answer.found == ()
    assert "whether the process of pp0 lived is not known: nothing that is here tells" in verdict(answer).notes


def test_a_hook_that_is_off_is_found(tmp_path: Path):
    """What the file itself says of its blindness counts."""
    off = [HookReport(hook="_update_states", state=HookState.OFF, reason="probe failed")]
    files = [write_flight(tmp_path, made_records(1, LAST), made_report(pp, hooks=off)) for pp in (0, 1)]

    assert {found.finding.kind for found in played(*files).found} == {FindingKind.BLIND}


def test_a_toggle_of_the_fix_is_no_mix(tmp_path: Path):
    """Ranks that act at the same step, one a step behind the other, never disagree about the fix."""
    word = layout.encode_control(1, 3, 20, desired=True)
    words = [0] * 13
    words[layout.CONTROL_REQUEST] = words[layout.ACK_OBSERVED] = words[layout.ACK_WORD] = word
    words[layout.ACK_STEP], words[layout.ACK_OUTCOME], words[layout.ACK_STATE] = 20, 2, 2
    records = made_records(1, LAST, lambda step: {"mitigation": 2 if step >= 20 else 1, "generation": 3 * (step >= 20)})
    late = records.copy()
    for name in ("begin_ns", "decide_ns", "end_ns"):
        late[name] += 300_000_000
    files = [
        write_flight(tmp_path, of, made_report(pp), control=words, capacity=64) for pp, of in enumerate((records, late))
    ]

    answer = played(*files)

    assert answer.found == ()
    assert verdict(answer).sentence.endswith("with the trim fix on.")


def test_drift_on_the_device_is_found_when_it_was_sampled(tmp_path: Path):
    """On V2 the one sample that the file has counts from when it was taken, with its age."""
    device = {"every": 32, "samples": 1, "step": 16, "taken_ns": begin_ns(16), "rows": 8, "excess_rows": 2, "total_excess": 6}  # fmt: skip
    report = made_v2_report(0, device=made_device(6))
    records = made_records(1, LAST, lambda _: {"lengths": 2, "mitigation": 3})
    files = [
        write_flight(tmp_path, records, report, device=device),
        write_flight(tmp_path, records, made_v2_report(1)),
    ]

    found = of_kind(played(*files), FindingKind.DRIFT)

    assert found is not None
    assert found.finding.step == 16
    assert found.finding.since_unix == pytest.approx(node_unix(begin_ns(16)), abs=0.3)


def test_clocks_of_two_nodes(tmp_path: Path):
    """Monotonic clocks of nodes have nothing to do with each other: each file's own pair of clocks dates its records."""
    files = write_wedge(tmp_path)
    raw = read_saved(SavedFile(files[1], "b")).records.copy()
    for name in ("begin_ns", "decide_ns", "end_ns"):
        raw[name][raw[name] > 0] += 5_000_000_000_000
    other = write_flight(
        tmp_path / "b", raw, made_report(1, host="node-b"), created_unix=START_UNIX, created_monotonic_ns=CREATED_NS + 5_000_000_000_000
    )  # fmt: skip

    answer = played(files[0], other, until_unix=node_unix(begin_ns(41)) + 10)

    assert [found.finding.step for found in verdict(answer).found] == [20, 30, 40, 40]
    assert answer.ended.unix - answer.begun_unix < 12


def test_long_silences_are_skipped(tmp_path: Path):
    """An hour of idleness takes some looks more, not thousands."""
    records = made_records(1, LAST)
    for name in ("begin_ns", "decide_ns", "end_ns"):
        records[name][20:] += 3_600_000_000_000
    files = [write_flight(tmp_path, records, made_report(pp)) for pp in (0, 1)]

    answer = played(*files)

    assert answer.found == ()
    assert answer.looks < 100


def test_steps_that_the_ring_no_longer_holds(tmp_path: Path):
    """A ring that begins in the middle finds nothing wrong in that, and says since when anything is known."""
    files = [write_flight(tmp_path, made_records(1000, 1100), made_report(pp)) for pp in (0, 1)]

    answer = played(*files)

    assert answer.found == ()
    assert "nothing is known of the steps before step 1000: the ring holds no more" in verdict(answer).notes


def test_what_the_first_steps_show_may_be_older(tmp_path: Path):
    """A ring that begins while ranks drift does not say where that began, and the verdict says so."""
    drifting = made_records(1000, 1100, lambda step: {"drift_max": 5, "drift_sum": 5, "drifting": 1})
    files = [
        write_flight(tmp_path, records, made_report(pp))
        for pp, records in enumerate((drifting, made_records(1000, 1100)))
    ]

    answer = played(*files)

    assert [(found.finding.kind, found.finding.step) for found in answer.found] == [(FindingKind.DRIFT, 1000)]
    assert (
        "nothing is known of the steps before step 1000: the ring holds no more; drift may have begun before it"
        in verdict(answer).notes
    )


def test_ranks_without_a_step(tmp_path: Path):
    """Ranks that have begun none are replayed too."""
    files = [write_flight(tmp_path, np.zeros(0, layout.STEP_DTYPE), made_report(pp)) for pp in (0, 1)]

    answer = played(*files)

    assert answer.found == ()
    assert verdict(answer).sentence == "Nothing found: pp0 and pp1 are up and have begun no step yet."


def test_requests_are_named_once_their_rows_were_written(tmp_path: Path):
    """The request table is of the end; findings get their names from it once its rows were there."""
    answer = played(*write_wedge(tmp_path), until_unix=node_unix(begin_ns(41)) + 10)

    drift = of_kind(answer, FindingKind.DRIFT)
    assert drift is not None
    assert drift.finding.evidence.requests[0] == "req-a"


@functools.cache
def wedged_files() -> tuple[bytes, ...]:
    """The bytes of a wedge's files."""
    with tempfile.TemporaryDirectory() as directory:
        return tuple(path.read_bytes() for path in write_wedge(Path(directory)))


@settings(max_examples=40, deadline=None)
@given(
    damage=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, len(wedged_files()[1]) - 1), st.sampled_from([0, 1, 127, 255])),
        max_size=60,
    ),
    until=st.none() | st.just(Until(after_seconds=20)),
)
def test_a_damaged_file_is_told_or_replayed(damage: list[tuple[int, int, int]], until: Until | None):
    """Whatever bytes are wrong in a file, it is either named as unusable or looked at; and everything can be told of it."""
    contents = [bytearray(content) for content in wedged_files()]
    for number, place, byte in damage:
        contents[number][place] = byte
    with tempfile.TemporaryDirectory() as name:
        directory, scratch = Path(name) / "files", Path(name) / "scratch"
        directory.mkdir()
        scratch.mkdir()
        for number, content in enumerate(contents):
            (directory / f"{number}.flight").write_bytes(content)

        replayed = replay([directory], scratch, clock=lambda: NodeClock(0, START_UNIX, 0.0), until=until)

    assert len(replayed.problems) + sum(len(of.engine.ranks) for of, _ in replayed.engines) >= 2
    for of, told in replayed.engines:
        assert list(engine_lines(of, told))
        json.dumps(engine_document(of, told))
        extract_step(of.engine, LAST)
    trace_replayed(replayed.engines)
