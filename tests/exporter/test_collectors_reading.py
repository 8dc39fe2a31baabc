"""
Reading a rank: which record each part is taken from, and which file stands for a rank.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter.collectors.reading import RankReading, current
from rankscope_exporter.contract import Detail, MitigationState, Phase, StepFailure
from rankscope_exporter.flight import layout
from rankscope_exporter.serve.node import Clock, Node, rank_report

Make = Callable[..., Any]


def read(flight_dir: Path) -> list[RankReading]:
    return Node(flight_dir, Clock()).read().ranks


def steps_of(reading: RankReading) -> list[int | None]:
    parts = reading.parts
    return [
        None if part is None else int(part["step"]) for part in (parts.begun, parts.state, parts.decided, parts.done)
    ]


def test_no_step(flight_dir: Path, rank_file: Make) -> None:
    """Before the first step no part is known."""
    rank_file(0)

    assert steps_of(read(flight_dir)[0]) == [None] * 4


def test_each_part_from_the_newest_record_that_has_it(flight_dir: Path, rank_file: Make) -> None:
    """While a step is in flight, the parts that it has not reached come from the step before."""
    rank = rank_file(0)
    rank.steps(3)
    seen = []
    for phase in (Phase.SCHEDULED, Phase.STATE_UPDATED, Phase.DECIDED, Phase.DONE):
        rank.step(4, phase)
        seen.append(steps_of(read(flight_dir)[0]))

    assert seen == [[4, 3, 3, 3], [4, 4, 3, 3], [4, 4, 4, 3], [4, 4, 4, 4]]


def test_far_back(flight_dir: Path, rank_file: Make) -> None:
    """A part that only an old record has is found as long as the ring holds that record."""
    rank = rank_file(0, capacity=256)
    rank.step(1)
    for step in range(2, 201):
        rank.step(step, Phase.SCHEDULED)

    assert steps_of(read(flight_dir)[0]) == [200, 1, 1, 1]


def test_record_being_begun(flight_dir: Path, rank_file: Make) -> None:
    """While the last record is being begun, its phase is unknown and the step before serves."""
    rank = rank_file(0)
    rank.steps(3)
    rank.writer.live[layout.LIVE_STEP] = 4

    reading = read(flight_dir)[0]

    assert (reading.step, reading.phase, reading.last, reading.in_flight_seconds) == (4, Phase.WRITING, None, None)
    assert steps_of(reading) == [3, 3, 3, 3]


def test_unmeasured(flight_dir: Path, rank_file: Make) -> None:
    """A record whose lengths were not read is not mistaken for one with lengths of 0, nor passed over for an older one."""
    rank = rank_file(0)
    rank.steps(3)
    rank.step(4, lengths=0, state_sum=0, state_max=0)

    assert read(flight_dir)[0].measured is None


def test_reports_that_change(flight_dir: Path, rank_file: Make) -> None:
    """A report that the rank writes anew is read anew."""
    node = Node(flight_dir, Clock())
    rank = rank_file(0)
    assert node.read().ranks[0].mitigations[0].state is MitigationState.AVAILABLE

    rank.mitigation(MitigationState.APPLIED)

    assert node.read().ranks[0].mitigations[0].state is MitigationState.APPLIED


def test_damaged_report(flight_dir: Path, rank_file: Make) -> None:
    """A rank whose hook report is no report is unreadable; the others are read."""
    rank_file(0).writer.write_report({"hooks": [{"hook": 1}]})
    rank_file(1)

    reading = Node(flight_dir, Clock()).read()

    assert [rank.identity.pp_rank for rank in reading.ranks] == [1]
    assert "hook" in reading.unreadable[0].reason


def test_report_of_a_failed_step(flight_dir: Path, rank_file: Make) -> None:
    """`/v1/ranks` tells of a failure as long as the rank has not gone on; meanwhile no step is in flight."""
    rank = rank_file(0)
    rank.fail(1, Phase.STATE_UPDATED, method="execute_model", kind="RuntimeError")

    report = rank_report(read(flight_dir)[0])

    expected = StepFailure(step=1, phase=Phase.STATE_UPDATED, method="execute_model", kind="RuntimeError")
    assert (report.failure, report.in_flight_seconds, report.phase) == (expected, None, Phase.STATE_UPDATED)
    rank.step(2)
    assert rank_report(read(flight_dir)[0]).failure is None


def test_report_of_detail_and_device_lengths(flight_dir: Path, rank_file: Make) -> None:
    """`/v1/ranks` has what a rank still records and, once a sample has arrived, its device-side lengths."""
    rank = rank_file(0)
    rank.writer.live[layout.LIVE_DETAIL] = int(Detail.REDUCED)
    rank.device(samples=0)
    before = rank_report(read(flight_dir)[0])
    rank.device(samples=2, step=128, rows=3, total_excess=1)
    after = rank_report(read(flight_dir)[0])

    assert (before.detail, before.device) == (Detail.REDUCED, None)
    assert after.device is not None
    assert (after.device.samples, after.device.step, after.device.rows, after.device.total_excess) == (2, 128, 3, 1)
    assert after.device.age_seconds is not None


@pytest.mark.parametrize("taken_ns", [0, 1 << 62])
def test_no_age_of_another_clock(flight_dir: Path, rank_file: Make, taken_ns: int) -> None:
    """A sample that this clock cannot date has no age."""
    rank_file(0).device(taken_ns=taken_ns)

    device = read(flight_dir)[0].device

    assert device is not None
    assert device.age_seconds is None


def test_current(flight_dir: Path, rank_file: Make) -> None:
    """Of several files of one rank the one of a live process stands for it, of several dead ones the youngest."""
    oldest, alive, dead = (rank_file(0, key=key) for key in ("c", "b", "a"))
    oldest.gone()
    dead.gone()
    assert [rank.key for rank in current(read(flight_dir))] == [alive.key]

    alive.gone()
    assert [rank.key for rank in current(read(flight_dir))] == [dead.key]
