"""
`rankscope-exporter tail`: what is told of live ranks.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter.cli import main
from rankscope_exporter.commands.tail import Tail, find_engine, tail
from rankscope_exporter.contract import Phase
from rankscope_exporter.flight import layout, list_flight_files

Make = Callable[..., Any]


class Proc:
    """A /proc in which this process has the state that a test gives it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        stat = Path("/proc/self/stat").read_text(encoding="ascii")
        self._head, _, self._rest = stat.rpartition(")")
        (directory / str(os.getpid())).mkdir(parents=True)
        self.state("S")

    def state(self, state: str) -> None:
        """Running (S), stopped (T) or a zombie (Z)."""
        fields = self._rest.split()
        (self.path / str(os.getpid()) / "stat").write_text(f"{self._head}) {' '.join([state, *fields[1:]])}")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """A /proc that tests turn."""
    return Proc(tmp_path / "proc")


@pytest.fixture
def following(flight_dir: Path, proc: Proc) -> Iterator[Tail]:
    """All ranks of the flight directory, from now on."""
    tail = Tail(lambda: list_flight_files(flight_dir), proc=proc.path)
    yield tail
    tail.close()


def said(lines: list[str]) -> list[str]:
    """Lines without the time of day."""
    return [line.partition("  ")[2].strip() for line in lines]


def test_one_line_a_step(following: Tail, rank_file: Make) -> None:
    """Steps that end between two looks come as a line each, in the order in which they began, of all ranks; older ones do not."""
    first, last = rank_file(0), rank_file(1)
    first.steps(3)
    last.steps(2)
    assert following.look(0.0) == []
    last.step(3, masked=1)
    first.step(4, drift_max=2, drifting=1)
    last.step(4, Phase.DECIDED)

    lines = said(following.look(0.1))

    assert lines == [
        "pp1-tp0  step 3  done  broadcast  role sender  requests 2  masked 1  width 4",
        "pp0-tp0  step 4  done  broadcast  role sender  requests 2  drift 2  drifting 1  width 4",
    ]
    assert following.look(0.2) == []


def test_from_the_start(flight_dir: Path, rank_file: Make, proc: Proc) -> None:
    """From the start means from the oldest step that the ring holds."""
    rank_file(0).steps(70)
    tail = Tail(lambda: list_flight_files(flight_dir), from_start=True, proc=proc.path)

    lines = said(tail.look(0.0))

    assert (len(lines), lines[0].split("  ")[1]) == (64, "step 7")
    tail.close()


def test_lost_failed_and_standing(following: Tail, rank_file: Make) -> None:
    """Steps that were overwritten between two looks, steps that failed, and steps that do not move are told of."""
    rank = rank_file(0)
    rank.steps(1)
    following.look(0.0)
    rank.steps(100)
    rank.step(101, Phase.STATE_UPDATED, failed=1)
    rank.step(102, Phase.DECIDED)

    lines = said(following.look(0.1))
    later = said(following.look(9.1))

    assert lines[0] == "pp0-tp0  steps 2 to 38 were lost: overwritten, or damaged, between two looks"
    assert lines[1].startswith("pp0-tp0  step 39  done")
    assert lines[-1] == "pp0-tp0  step 101  state_updated, failed  -"
    assert later == ["pp0-tp0  step 102  in flight, decided, and has not moved for at least 9.0 s"]


def test_what_becomes_of_the_process(following: Tail, rank_file: Make, proc: Proc) -> None:
    """A process that is stopped, continued or gone is told of once each."""
    rank_file(0).steps(5)
    lines = [following.look(0.0)]
    for state in "TTSZZ":
        proc.state(state)
        lines.append(following.look(0.0))

    assert [said(look) for look in lines] == [
        [],
        [f"pp0-tp0  its process is stopped by a signal; `kill -CONT {os.getpid()}` continues it; last step 5"],
        [],
        ["pp0-tp0  its process runs; last step 5"],
        ["pp0-tp0  its process is gone; last step 5"],
        [],
    ]


def test_files_come_and_go(following: Tail, rank_file: Make, flight_dir: Path) -> None:
    """Ranks that come later are told of from their first step, also under an old name; a file that is removed is told of."""
    assert following.look(0.0) == []
    rank = rank_file(0)
    rank.steps(2)
    assert [line.split("  ")[1] for line in said(following.look(0.1))] == ["step 1", "step 2"]
    rank.path.unlink()
    rank_file(0).steps(1)
    assert [line.split("  ")[1] for line in said(following.look(0.2))] == ["step 1"]
    shutil.rmtree(flight_dir)
    assert following.look(0.3) == ["pp0-tp0: its flight file was removed"]
    assert following.following == 0


def test_several_engines_are_told_apart(following: Tail, rank_file: Make) -> None:
    """With ranks of several engines each line names the engine."""
    ranks = [rank_file(0), rank_file(0, engine="e2")]
    following.look(0.0)
    for rank in ranks:
        rank.step(1)

    assert [line.split("  ")[0] for line in said(following.look(0.1))] == ["e1 pp0-tp0", "e2 pp0-tp0"]


def test_bad_files_hide_nothing(following: Tail, rank_file: Make, flight_dir: Path) -> None:
    """A file that cannot be read, or is cut short later, is told of once, and the others go on."""
    good, bad = rank_file(0), rank_file(1)
    old = bytearray(bad.path.read_bytes())
    old[8] = 1
    (flight_dir / "old.flight").write_bytes(old)

    assert "version 1 is older" in following.look(0.0)[0]
    bad.step(1)  # before it is cut: a store into a map beyond the end of its file would end this process
    os.truncate(bad.path, layout.RING_OFFSET)
    good.step(1)
    lines = following.look(0.1)

    assert lines[0].endswith("width 4")
    assert lines[1:] == [f"{bad.path.name}: cut short while it was read"]
    assert following.look(0.2) == []


def test_an_engine_by_its_name(rank_file: Make, flight_dir: Path) -> None:
    """An engine is found by its name, or by the beginning of it if that is enough."""
    assert find_engine("e1", ["e1", "e10"]) == "e1"
    assert find_engine("can", ["base", "canary"]) == "canary"
    assert find_engine("e", ["e1", "e2"]) is None
    assert find_engine("x", []) is None
    for engine in ("one", "two"):
        rank_file(0, engine=engine).steps(2)
    out = io.StringIO()

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    code = tail("on", flight_dir, from_start=True, interval=1.0, out=out, complain=print, wait=stop)

    assert code == 0
    assert [line.split("  ")[1:3] for line in out.getvalue().splitlines()] == [
        ["pp0-tp0", "step 1"],
        ["pp0-tp0", "step 2"],
    ]


@pytest.mark.parametrize(
    ("target", "code", "told"),
    [
        ("three", 1, "engines there: one"),
        ("{dir}/missing.flight", 1, "No such file"),
        ("{dir}/noise.flight", 1, "not a flight file"),
        ("{dir}", 2, "--flight-dir"),
    ],
)
def test_what_cannot_be_followed(
    target: str, code: int, told: str, rank_file: Make, flight_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is none, a directory, and an engine that is not there end at once, with what would do."""
    rank_file(0, engine="one")
    (flight_dir / "noise.flight").write_bytes(bytes(4096))

    assert main(["tail", target.format(dir=flight_dir), "--flight-dir", str(flight_dir)]) == code
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "soon"])
def test_intervals_that_are_none(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An interval that is no sensible time ends with 2."""
    with pytest.raises(SystemExit) as ended:
        main(["tail", "--interval", interval])
    assert ended.value.code == 2
    assert "not a number of seconds" in capsys.readouterr().err


@pytest.mark.integration
def heed_interrupt() -> None:
    """A shell that starts this in the background makes it, and what it starts, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_until_ctrl_c(rank_file: Make, flight_dir: Path) -> None:
    """It waits for ranks that are not there yet, follows them, and ends with 0 at Ctrl-C."""
    command = [sys.executable, "-m", "rankscope_exporter", "tail", "--interval", "0.05"]
    environment = os.environ | {"RANKSCOPE_FLIGHT_DIR": str(flight_dir)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        preexec_fn=heed_interrupt,  # noqa: PLW1509  no thread runs here
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "waiting" in process.stderr.readline()
        rank_file(0).step(1)
        assert "step 1  done" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 0
        assert process.stderr.read() == ""
