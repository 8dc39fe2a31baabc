"""The failure class: every case gets the verdict that it must get, through the code of `rankscope replay`, and no other."""

import sys
from pathlib import Path

import make
import pytest
from made_case import BOOTED_UNIX, Case, Made, make_case, write_case

from cases import CASES
from rankscope_server.domain.clock import NodeClock
from rankscope_server.replay.playing import Played
from rankscope_server.replay.run import replay


def unread() -> NodeClock:
    """Clocks of a machine that has none of the cases' processes."""
    return NodeClock(0, BOOTED_UNIX, 0.0)


def check(made: Made, played: Played) -> None:
    """What was found on one engine is what must be found, and nothing else."""
    labels = {rank.saved.id: rank.label for rank in played.engine.ranks}
    found = {one.finding.kind: one.finding for one in reversed(played.found)}
    expected = {verdict.kind for verdict in made.verdicts}
    told = {kind.value: finding.sentence for kind, finding in found.items()}
    assert expected <= set(found), told
    assert set(found) <= expected | set(made.along), told
    for verdict in made.verdicts:
        finding = found[verdict.kind]
        assert (verdict.kind, finding.step) == (verdict.kind, verdict.step if verdict.step is not None else finding.step)  # fmt: skip
        if verdict.ranks:
            assert (verdict.kind, tuple(labels[rank] for rank in finding.ranks)) == (verdict.kind, verdict.ranks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case, tmp_path: Path):
    """The verdict: which kinds, from which step on, on which ranks."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    engines = make_case(case)

    replayed = replay([write_case(case, engines, tmp_path)], scratch, clock=unread)

    assert replayed.problems == ()
    assert len(replayed.engines) == len(engines)
    for engine, (played, _) in zip(engines, replayed.engines, strict=True):
        check(engine, played)


def test_the_class_is_covered():
    """There are enough cases, each with a name of its own, and among them such that must never be called a divergence."""
    assert len({case.name for case in CASES}) == len(CASES) >= 32
    reported = [case for case in CASES if case.reports]
    assert len({report for case in reported for report in case.reports}) >= 30


def test_cases_are_made_by_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The script writes folders that open, never over another; an unknown name is told with those that there are."""

    def run(*names: str) -> int:
        monkeypatch.setattr(sys, "argv", ["make.py", str(tmp_path), *names])
        return make.main()

    assert [run("fix-on-some-ranks"), run("fix-on-some-ranks"), run("no-such")] == [0, 2, 2]

    assert len(list((tmp_path / "fix-on-some-ranks").glob("*.flight"))) == 2
    twice, unknown = capsys.readouterr().err.splitlines()
    assert twice.endswith("is there already; name another directory")
    assert unknown.startswith("make.py: no case no-such; there are trim-on-last-rank-only")
