"""
The lab's command line and what it leaves on disk, without vLLM.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rankscope_lab import __main__ as command
from rankscope_lab import environment, state, supervisor
from rankscope_lab.processes import MARK, marked, started


def deployment(flight_dir: Path, run_id: str) -> state.DeploymentState:
    return state.DeploymentState(
        "baseline", "serving", "http://127.0.0.1:1", None, str(flight_dir), "log", [run_id], requests=3, completed=2
    )


def test_targets_are_what_the_server_reads(tmp_path: Path) -> None:
    """One deployment each, its role the same as its name, with exporter and token file."""
    read = yaml.safe_load(
        supervisor.targets(
            [("baseline", "http://127.0.0.1:9611"), ("canary", "http://127.0.0.1:9612")], tmp_path / "token"
        )
    )
    assert [(entry["name"], entry["role"]) for entry in read["deployments"]] == [
        ("baseline", "baseline"),
        ("canary", "canary"),
    ]
    assert read["deployments"][1]["exporters"] == ["http://127.0.0.1:9612"]
    assert read["deployments"][0]["control_token_file"] == str(tmp_path / "token")


def test_ranks_get_processors_of_their_own_where_there_are_enough() -> None:
    """Four processors are shared out; two are used twice."""
    assert [supervisor.cpus_for(place, (4, 5, 6, 7)) for place in (0, 1)] == [(4, 5), (6, 7)]
    assert [supervisor.cpus_for(place, (0, 1)) for place in (0, 1)] == [(0, 1), (0, 1)]
    assert supervisor.cpus_for(0, (3,)) == (3, 3)


@pytest.mark.parametrize("name", sorted(command.COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` works for each command that there is."""
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert "--directory" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["no-such"], ["up", "--accept", "1.5"], ["up", "--hold", "-1"]])
def test_a_wrong_call_is_exit_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be meant is refused before anything starts."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_status_without_a_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No lab is exit status 3, and says so."""
    assert command.main(["status", "--directory", str(tmp_path)]) == 3
    assert "no lab runs" in capsys.readouterr().out


def test_status_of_a_running_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A running lab is shown with its deployments."""
    mine = started(os.getpid())
    assert mine is not None
    state.write(tmp_path, state.LabState(os.getpid(), mine, "hold", [deployment(tmp_path, "none")]))
    assert command.main(["status", "--directory", str(tmp_path)]) == 0
    assert "2 completed" in capsys.readouterr().out


def test_a_second_lab_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A lab that runs in a directory keeps another one out, and says how to end it."""
    mine = started(os.getpid())
    assert mine is not None
    state.write(tmp_path, state.LabState(os.getpid(), mine, "hold", []))
    options = supervisor.LabOptions(
        environment.Environment(tmp_path),
        tmp_path,
        tmp_path / "flight",
        (1, 2),
        hold_seconds=1,
        pace_ms=0,
        acceptance=1,
        slots=1,
        draft_tokens=1,
        seed=0,
    )
    with pytest.raises(supervisor.LabError, match="down"):
        supervisor.up(options, None, print)  # type: ignore[arg-type]  # it never comes to the checkpoints


@pytest.mark.integration
@pytest.mark.timeout(60)
def test_down_cleans_up_after_a_lab_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes and flight files of a lab that is gone are removed, by its marks."""
    flight, run_id = tmp_path / "root" / "baseline", f"crashed-{os.getpid()}"
    flight.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, MARK: run_id}
    ) as left:
        state.write(tmp_path, state.LabState(left.pid, 1, "hold", [deployment(flight, run_id)]))
        assert command.main(["down", "--directory", str(tmp_path), "--flight-root", str(tmp_path / "root")]) == 0
    assert "1 had to be killed" in capsys.readouterr().out
    assert marked(run_id) == []
    assert not flight.exists()
    assert state.read(tmp_path) is None


def test_a_damaged_state_is_no_lab(tmp_path: Path) -> None:
    """What another version wrote, or half of it, is not taken for a running lab."""
    for text in ("", "[]", '{"pid": 1}'):
        state.path_in(tmp_path).write_text(text)
        assert state.read(tmp_path) is None


def test_an_environment_without_stamp_is_not_ready(tmp_path: Path) -> None:
    """A directory that is there but was never finished counts as not made."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert not environment.Environment(tmp_path).ready()
    (tmp_path / environment.STAMP).write_text("{")
    assert not environment.Environment(tmp_path).ready()


def test_a_full_disk_is_named_before_anything_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is an error that names the place and the way out."""
    monkeypatch.setattr(environment, "NEEDED_BYTES", 1 << 62)
    with pytest.raises(environment.SetupError, match=environment.VARIABLE):
        environment.ensure(environment.Environment(tmp_path / "new"), print)
    assert not (tmp_path / "new").exists()


def test_uv_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What uv said last stands in the error."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    fake = tmp_path / "uv"
    fake.write_text("#!/bin/sh\ncase \"$*\" in *list*) echo '[]';; *) echo 'no route to the index'; exit 1;; esac\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(environment, "find_uv", lambda: str(fake))
    with pytest.raises(environment.SetupError, match="no route to the index"):
        environment.ensure(environment.Environment(tmp_path), print)


def test_each_release_has_an_environment_of_its_own(tmp_path: Path) -> None:
    """The variables name the lab's two environments; any other release lies beside them, under its number."""
    environ = {environment.VARIABLE: str(tmp_path / "one"), environment.V2_VARIABLE: str(tmp_path / "two")}
    found = [environment.of_release(release, environ).directory for release in ("0.27.1", "0.32.0", "0.30.0")]
    assert found == [tmp_path / "one", tmp_path / "two", environment.REPOSITORY / ".venv-vllm-0.30.0"]


def test_pytorch_comes_from_a_directory_that_has_its_cpu_build(tmp_path: Path) -> None:
    """A directory of wheels that pip knows is used only if PyTorch's CPU build lies in it; else PyTorch's own index is."""
    assert environment.torch_source([str(tmp_path)]) == ["--torch-backend", "cpu"]
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert environment.torch_source(["/nowhere", f"file://{tmp_path}"]) == ["--find-links", f"file://{tmp_path}"]


def test_an_upgrade_of_what_vllm_pins_is_an_error() -> None:
    """Installing Rankscope must leave vLLM's FastAPI alone."""
    with pytest.raises(environment.SetupError, match=r"fastapi 0\.136\.3 -> 0\.165\.0"):
        environment._check_unchanged({"fastapi": "0.136.3"}, {"fastapi": "0.165.0"})
