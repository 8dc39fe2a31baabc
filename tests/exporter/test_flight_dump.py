"""
`rankscope-exporter dump`: what a person and a script see of flight files.
"""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter.cli import main
from rankscope_exporter.contract import Guard, Phase
from rankscope_exporter.flight import layout

Make = Callable[..., Any]
Capture = pytest.CaptureFixture[str]


def dump(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and complaints of a dump."""
    code = main(["dump", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_table_of_what_says_something(rank_file: Make, capsys: Capture) -> None:
    """Steps come as a table under a line that says whose they are; columns that are zero or unknown throughout are left out."""
    rank = rank_file(0)
    rank.steps(3)
    rank.step(4, Phase.STATE_UPDATED, drift_max=2, drifting=1)

    code, out, err = dump(capsys, rank.path)

    assert (code, err) == (0, "")
    head, titles, *rows = out.splitlines()
    assert f"{rank.path.name}: engine e1, pp 0/2 tp 0/1 dp 0/1, some/model, vLLM 0.27.1 V1, on node-a" in head
    assert head.endswith("last step 4, state_updated")
    assert titles.split()[:2] == ["step", "begin"]
    assert "drift " in titles
    assert not {"masked", "queue", "generation", "dropped"} & set(titles.split())
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4"]
    assert " - " in rows[-1]


def test_choosing_steps(rank_file: Make, capsys: Capture) -> None:
    """`--after` and `--last` choose; a table says how many more there are, and shows 40 unless told otherwise."""
    rank = rank_file(0)
    rank.steps(60)

    def steps(*arguments: object) -> list[int]:
        out = dump(capsys, rank.path, "--json", *arguments)[1]
        return [json.loads(line)["step"] for line in out.splitlines()]

    assert steps() == list(range(1, 61))
    assert steps("--last", 2) == [59, 60]
    assert steps("--after", 55) == list(range(56, 61))
    assert steps("--after", 55, "--last", 1) == [60]
    assert steps("--last", 0) == steps("--after", 60) == []
    assert "40 of 60 steps, 1 to 60" in dump(capsys, rank.path)[1]
    assert "no steps among those asked for; the file holds 1 to 60" in dump(capsys, rank.path, "--after", 2**64)[1]


def test_json_lines(rank_file: Make, capsys: Capture) -> None:
    """Each step is a JSON object with every field; what is not known is null, never zero."""
    rank = rank_file(0)
    rank.step(1, Phase.DECIDED, batch_hash=2**64 - 1, width=0, mask_known=0)

    row = json.loads(dump(capsys, rank.path, "--json")[1])

    assert row["kind"] == "step"
    assert (row["engine"], row["rank"], row["file"]) == ("e1", "pp0-tp0", rank.path.name)
    assert (row["phase"], row["guard"], row["role"], row["lengths"]) == (
        "decided",
        "broadcast",
        "sender",
        "output_tokens",
    )
    assert row["batch_hash"] == "f" * 16
    assert row["drift_max"] == 0
    unknown = ("width", "masked", "mask_hash", "end_ns", "own_ns", "queue_depth")
    assert [row[name] for name in unknown] == [None] * len(unknown)
    names = set(layout.STEP_DTYPE.names) - {"state_pad", "reserved", "mask_known"}
    assert names <= row.keys()


def test_lengths_that_nobody_read(rank_file: Make, capsys: Capture) -> None:
    """A step that was done without its request state being read has no lengths, no drift and no state of the trim fix."""
    rank = rank_file(0)
    rank.step(1, lengths=0, mitigation=0, guard=Guard.NONE)

    row = json.loads(dump(capsys, rank.path, "--json")[1])

    unknown = ("drift_max", "state_sum", "scheduler_max", "trimmed_total", "mitigation", "guard", "masked", "requests")
    assert [row[name] for name in unknown] == [None] * len(unknown)


def test_csv(rank_file: Make, capsys: Capture) -> None:
    """CSV has one line of titles, whatever the number of files, and the fields of JSON."""
    paths = [rank_file(pp).path for pp in (0, 1)]
    for pp in (0, 1):
        rank_file(pp, key=f"again-{pp}").steps(2)
    paths = [path for path in paths[0].parent.iterdir() if path.name.startswith("again")]

    rows = list(csv.DictReader(io.StringIO(dump(capsys, *paths, "--csv")[1])))

    assert [row["step"] for row in rows] == ["1", "2", "1", "2"]
    assert rows[0]["queue_depth"] == ""


def test_requests(rank_file: Make, capsys: Capture) -> None:
    """The requests that drift, as a table, JSON or CSV; nothing in an id can steer the terminal."""
    rank = rank_file(0)
    evil = "a\x1b[2J\n\u202e".encode()
    rank.writer.write_requests([(9, 3, 12, 10, 2, layout.MARGIN_UNKNOWN, 1, len(evil), evil)], 5)

    table = dump(capsys, rank.path, "--requests")[1]
    row = json.loads(dump(capsys, rank.path, "--requests", "--json")[1])
    rows = list(csv.DictReader(io.StringIO(dump(capsys, rank.path, "--requests", "--csv")[1])))

    assert "5 requests drift, the worst 1:" in table
    assert "a\\x1b[2J\\n\\u202e" in table
    assert "\x1b" not in table
    assert (row["kind"], row["request_id"], row["drift"], row["margin"]) == ("request", evil.decode(), 2, None)
    assert rows[0]["request_id"] == evil.decode()


def test_header(rank_file: Make, capsys: Capture) -> None:
    """Everything but steps and requests, for people and as JSON."""
    rank = rank_file(0)
    rank.step(1)
    rank.writer.words[layout.CONTROL_REQUEST] = layout.encode_control(1, 3, 100, desired=True)
    rank.writer.lengths[2] = 4
    rank.writer.own[3] = 5

    text = dump(capsys, rank.path, "--header")[1]
    facts = json.loads(dump(capsys, rank.path, "--header", "--json")[1])

    assert "engine: e1" in text
    assert "hook update_states, state on" in text
    assert "state: <=2: 4" in text
    assert "steps: <=8us: 5" in text
    assert facts["identity"]["pp_rank"] == 0
    assert facts["control"]["requested"] == {
        "mitigation": "trim",
        "generation": 3,
        "effective_step": 100,
        "desired": True,
    }
    assert facts["control"]["acted"] is None
    assert facts["last_phase"] == "done"
    assert facts["device_lengths"] is None


def test_a_damaged_area_hides_nothing_else(rank_file: Make, capsys: Capture) -> None:
    """Where identity or report are damaged the steps are shown all the same, and the header says what is damaged."""
    rank = rank_file(0)
    rank.step(1)
    rank.writer.memory[layout.IDENTITY_OFFSET + layout.BLOB_HEAD.size] = 0xFF

    code, out, _ = dump(capsys, rank.path)
    facts = json.loads(dump(capsys, rank.path, "--header", "--json")[1])

    assert code == 0
    assert "identity damaged" in out.splitlines()[0]
    assert out.splitlines()[2].split()[0] == "1"
    assert facts["identity"] is None
    assert "unreadable JSON area" in facts["damaged"][0]


def test_what_cannot_be_read(rank_file: Make, tmp_path: Path, capsys: Capture) -> None:
    """What cannot be read is told of on standard error and by exit code 1; the rest is shown."""
    rank = rank_file(0)
    rank.step(1)
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "noise.flight").write_bytes(b"noise" * 100)

    code, out, err = dump(capsys, tmp_path / "missing", empty, tmp_path / "noise.flight", rank.path)

    assert code == 1
    assert out.startswith(rank.path.name)
    assert [line.rpartition(": ")[2] for line in err.splitlines()] == [
        "no such file or directory",
        "no flight files (*.flight) that can be seen in this directory",
        "not a flight file",
    ]


def test_before_the_first_step(rank_file: Make, capsys: Capture) -> None:
    """A rank that has not begun a step says so."""
    code, out, _ = dump(capsys, rank_file(0).path)

    assert code == 0
    assert "no step yet" in out
    assert out.splitlines()[1:] == ["no steps"]


@pytest.fixture
def parted(rank_file: Make, flight_dir: Path) -> Path:
    """Two ranks that part at step 50: the first masks a request there, and skips the collective at step 52."""
    first, last = rank_file(0), rank_file(1)
    for step in range(1, 60):
        first.step(step, masked=int(step >= 50), mask_hash=7 * (step >= 50), posted=1)
        last.step(step, posted=1)
    first.step(52, masked=2, mask_hash=9, guard=Guard.SKIP, posted=0)
    first.step(60, Phase.STATE_UPDATED, drift_max=5, drifting=1)
    return flight_dir


def test_ranks_side_by_side(parted: Path, capsys: Capture) -> None:
    """`--align` shows the ranks by step, marks the first step in which they differ, says in what, and ends with 3."""
    code, out, err = dump(capsys, "--align", parted)

    assert (code, err) == (3, "")
    lines = out.splitlines()
    marked = [line for line in lines if line.startswith((">", "!"))]
    assert [line.split()[:2] for line in marked[:3]] == [[">", "50"], ["!", "51"], ["!", "52"]]
    assert marked[2].endswith("guard, mask, posted")
    assert lines[-1].startswith(
        "first difference at step 50: mask; pp0-tp0: mask 0000000000000007 (1 masked); pp1-tp0: mask 0"
    )


def test_the_first_difference_is_shown_however_old(parted: Path, capsys: Capture) -> None:
    """Without a choice of steps those around the first difference are shown, and with one the last line still names it."""
    chosen = dump(capsys, "--align", parted, "--last", "2")[1]
    rows = [json.loads(line) for line in dump(capsys, "--align", parted, "--json")[1].splitlines()]

    assert [line.split()[1] for line in chosen.splitlines() if line.startswith("!")] == ["59"]
    assert "first difference at step 50" in chosen
    assert next(row["step"] for row in rows if row["differs"]) == 50
    assert rows[-1]["ranks"]["pp1-tp0"] is None
    assert rows[-1]["ranks"]["pp0-tp0"]["drift_max"] == 5


def test_equal_ranks(rank_file: Make, flight_dir: Path, capsys: Capture) -> None:
    """Ranks that agree end with 0; what one does not know, or has not come to, differs from nothing."""
    first, last = rank_file(0), rank_file(1)
    for step in range(1, 20):
        first.step(step, drift_max=step)
        last.step(step, mask_known=0, mask_hash=0, width=0)
    last.step(20, Phase.SCHEDULED)
    first.step(20)

    code, out, _ = dump(capsys, "--align", flight_dir)

    assert code == 0
    assert out.splitlines()[-1] == "no difference in the 20 steps that at least two ranks hold"


def test_what_cannot_be_aligned(rank_file: Make, flight_dir: Path, capsys: Capture) -> None:
    """One rank, ranks of two engines, two files of a rank, and ranks without a step in common are refused with the reason."""
    first = rank_file(0)
    first.steps(3)
    other = rank_file(1, engine="e2")
    again = rank_file(0, key="again")
    late = rank_file(1)
    late.step(100)

    assert "at least two ranks" in dump(capsys, "--align", first.path)[2]
    assert "2 engines" in dump(capsys, "--align", first.path, other.path)[2]
    assert "several files of pp0-tp0" in dump(capsys, "--align", first.path, again.path)[2]
    code, _, err = dump(capsys, "--align", first.path, late.path)
    assert code == 1
    assert "no two ranks hold the same step, so nothing can be compared: pp0-tp0 1 to 3, pp1-tp0 100 to 100" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--align", "--csv"], ["--align", "--header"], ["--header", "--csv"], ["--json", "--csv"], ["--requests", "--last", "1"],
        ["--last", "-1"], ["--after", "many"], ["--after", "9" * 30],
    ],
)  # fmt: skip
def test_called_wrongly(arguments: list[str], capsys: Capture) -> None:
    """Flags that do not go together, and numbers that are none, end with 2 and a usage line."""
    with pytest.raises(SystemExit) as ended:
        main(["dump", "x.flight", *arguments])

    assert ended.value.code == 2
    assert "usage: rankscope-exporter dump" in capsys.readouterr().err


@pytest.mark.integration
def test_a_reader_that_goes_away(rank_file: Make) -> None:
    """`dump | head` ends quietly."""
    rank = rank_file(0, capacity=4096)
    rank.steps(4000)
    command = [sys.executable, "-m", "rankscope_exporter", "dump", "--json", str(rank.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(200) == 0
