"""`rankscope replay`: what a tired person reads, what a script reads, and exit codes."""

import json
import time
from pathlib import Path

import anyio
import pytest
from made_ranks import START_UNIX, made_engine, made_rank, made_record, made_records, made_report
from saved_flights import LAST, write_flight, write_wedge
from typer.testing import CliRunner, Result

from rankscope_exporter.cli import main as exporter
from rankscope_exporter.contract import Phase
from rankscope_server.cli import cli
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.incident import IncidentLife
from rankscope_server.incidents.capture import CaptureSubject, make_capture
from rankscope_server.replay.places import SavedFile
from rankscope_server.replay.saved import read_saved


def replay(*arguments: object) -> Result:
    """The command's exit code, output and complaints."""
    return CliRunner().invoke(cli, ["replay", *map(str, arguments)])


def healthy(directory: Path, **identity: object) -> list[Path]:
    """Two ranks that agree."""
    return [write_flight(directory, made_records(1, LAST), made_report(pp, **identity)) for pp in (0, 1)]


def test_nothing_found(tmp_path: Path):
    """Exit code 0: who it is, what was covered, and that nothing was found."""
    healthy(tmp_path)

    result = replay(tmp_path)

    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "engine e1: some/model, vLLM 0.27.1, V1 runner, ranks pp0 and pp1"
    assert lines[1] == "steps 1 to 40, 2023-11-14 22:13:20.1 to 2023-11-14 22:13:20.9 UTC"
    assert lines[3] == "  Nothing found: pp0 and pp1 agree up to step 40."


def test_something_found(tmp_path: Path):
    """Exit code 1: the verdict in a sentence, then findings in order of cause with step, time, ranks' words and requests."""
    write_wedge(tmp_path)

    result = replay(tmp_path, "--until", "+30")

    assert result.exit_code == 1
    text = result.stdout
    heads = [line for line in text.splitlines() if line.startswith("  ") and line[2] in "dmgw" and ", step" in line]
    assert [head.split(", ")[0].strip() for head in heads] == ["drift", "mask disagreement", "guard disagreement", "wedged"]  # fmt: skip
    assert "guard disagreement, step 40, 0.4 s after the first drift" in text
    assert "    requests: req-a, req-b" in text
    assert "    pp0: skips the collective, all 8 requests masked" in text
    assert "--until TIME" not in text


def test_a_forecast_and_how_it_came(tmp_path: Path):
    """What was foreseen while it drifted is told beside what came of it."""
    write_wedge(tmp_path)

    assert "Forecast at 2023-11-14 22:13:20" in replay(tmp_path).stdout


def test_several_engines_and_one_bad_file(tmp_path: Path):
    """What can be looked at is; the rest is said on standard error, and does not decide the exit code."""
    healthy(tmp_path)
    healthy(tmp_path, engine="e2")
    bad = tmp_path / "bad.flight"
    bad.write_bytes(b"nothing")

    result = replay(tmp_path)

    assert result.exit_code == 0
    assert result.stdout.count("engine e") == 2
    assert result.stderr == f"rankscope replay: left out: {bad}: 7 bytes are too few for a flight file\n"


def test_nothing_that_can_be_used(tmp_path: Path):
    """Exit code 2, each place with what is wrong with it, and nothing on standard output."""
    result = replay(tmp_path / "missing", tmp_path)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"rankscope replay: {tmp_path / 'missing'}: no such file or directory",
        f"rankscope replay: {tmp_path}: no flight files (*.flight) in this directory, nor below it",
    ]


def test_a_time_that_is_none(tmp_path: Path):
    """Exit code 2 before anything is read, with how to write a time."""
    result = replay(tmp_path, "--until", "soon")

    assert result.exit_code == 2
    assert "not a time; write 2026-12-01T14:03:00Z" in result.stderr


def test_json(tmp_path: Path):
    """One document with everything in it: findings with their evidence, when they were found, and what is not known."""
    write_wedge(tmp_path)
    (tmp_path / "bad.flight").write_bytes(b"")

    result = replay(tmp_path, "--json", "--until", "+30", "--step", 40)

    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert answer["schema_version"] == 1
    assert answer["problems"] == [f"{tmp_path / 'bad.flight'}: 0 bytes are too few for a flight file"]
    (engine,) = answer["engines"]
    assert (engine["engine"], engine["first_step"], engine["last_step"], engine["state"]) == ("e1", 1, 41, "wedged")
    assert [rank["label"] for rank in engine["ranks"]] == ["pp0", "pp1"]
    assert engine["ranks"][0]["taken_unix"] is None
    guard = next(finding for finding in engine["findings"] if finding["kind"] == "guard disagreement")
    assert guard["step"] == 40
    assert guard["found_unix"] >= guard["since_unix"] > engine["first_drift_unix"]
    assert {value["label"] for value in guard["evidence"]["values"]} == {"pp0", "pp1"}
    assert guard["seconds_after_first_drift"] == pytest.approx(0.4, abs=0.02)
    assert engine["step"]["facts"]["guard"] == {"differs": True, "ranks": {"pp0": "skip", "pp1": "broadcast"}}


def test_one_step_on_all_ranks(tmp_path: Path):
    """The records of a step side by side, with a mark where ranks differ in what must be the same."""
    write_wedge(tmp_path)

    lines = replay(tmp_path, "--step", 40).stdout.splitlines()

    table = lines[lines.index("  step 40 on each rank") + 1 :]
    words = {line[4:24].strip(): line.split()[-1] for line in table[1:]}
    assert table[0].split() == ["pp0", "pp1"]
    assert [name for name, last in words.items() if last == "differs"] == ["guard", "masked requests", "mask hash"]
    assert words["done"] == "-"


def test_a_step_that_no_rank_has(tmp_path: Path):
    """It is said, and the rest is told all the same."""
    healthy(tmp_path)

    assert "  step 999: no rank has a record of it" in replay(tmp_path, "--step", 999).stdout


def test_copies_with_the_time_in_their_name_tell_a_hang(tmp_path: Path):
    """Copies say when they were made: a step that was in flight a minute before that hangs."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(START_UNIX + 60))
    for pp, path in enumerate(write_wedge(tmp_path / "flight")):
        copy = tmp_path / "copies" / f"e1-dp0-pp{pp}-tp0-{4000 + pp}.{moment}.flight"
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())

    text = replay(tmp_path / "copies").stdout

    assert "\n  wedged, step 40" in text
    assert "--until" not in text


def test_an_archive_that_the_exporter_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What `rankscope-exporter copy` packs, `rankscope replay` opens, and it knows when the copy was made."""
    write_wedge(tmp_path / "flight")
    archive = tmp_path / "kept.tar.gz"
    assert exporter(["copy", str(tmp_path / "flight"), str(archive)]) == 0

    result = replay(archive)

    assert (result.exit_code, result.stderr) == (1, "")
    assert "\n  wedged, step 40" in result.stdout


def test_a_capture_that_the_server_made(tmp_path: Path):
    """What the server keeps of an incident says the same again: findings, and that the ranks hung when it was made."""
    now = Moment(START_UNIX + 30, 1030.0)
    ranks = []
    for path in write_wedge(tmp_path / "flight"):
        saved = read_saved(SavedFile(path, str(path)))
        ranks.append(made_rank(saved.records, saved.report, now=now, quiet=20))
    subject = CaptureSubject(made_engine(*ranks, now=now), "i-1", IncidentLife.WEDGED, "A sentence.", ())
    (tmp_path / "incident.zip").write_bytes(anyio.run(make_capture, subject, now).data)

    result = replay(tmp_path / "incident.zip", "--json")

    (engine,) = json.loads(result.stdout)["engines"]
    assert [finding["kind"] for finding in engine["findings"]] == ["drift", "mask disagreement", "guard disagreement", "wedged"]  # fmt: skip
    assert [rank["life"] for rank in engine["ranks"]] == ["running", "running"]
    assert engine["notes"] == []


def test_what_a_file_holds_cannot_steer_the_terminal(tmp_path: Path):
    """Names out of a file are shown with their escapes written out."""
    write_flight(tmp_path, made_record(1, Phase.DONE), made_report(model="\x1b[31mred\n", pp_size=1))

    assert "\\x1b[31mred\\n" in replay(tmp_path).stdout
    assert "\x1b" not in replay(tmp_path).stdout


def test_a_trace_for_perfetto(tmp_path: Path):
    """The trace has a track per rank and a mark per finding; a place where it cannot be written is told."""
    write_wedge(tmp_path / "flight")
    trace = tmp_path / "trace.json"

    result = replay(tmp_path / "flight", "--perfetto", trace)
    refused = replay(tmp_path / "flight", "--perfetto", tmp_path / "no" / "trace.json")

    events = json.loads(trace.read_text())["traceEvents"]
    assert result.exit_code == 1
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"pp0", "pp1"}
    assert len([e for e in events if e.get("cat") == "finding"]) == 3
    assert max(e["ts"] for e in events if "ts" in e) < 2_000_000
    assert refused.exit_code == 2
    assert "No such file or directory; name another file with --perfetto" in refused.stderr
