"""
The command line of the simulation, and the targets that it writes.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rankscope_exporter.simulation.cli import main, make_parser, read_specs
from rankscope_exporter.simulation.options import OptionError, parse_deployment
from rankscope_exporter.simulation.spec import EngineSpec, Workload
from rankscope_exporter.simulation.targets import Target, render_targets, write_whole

DEFAULT = EngineSpec("", Path("/d"), Workload(hold_seconds=5.0))


def specs(*argv: str) -> list[EngineSpec]:
    """The engines of a command line."""
    return read_specs(make_parser().parse_args(argv), Path("/d"))


def test_deployment_is_read_in_full() -> None:
    """Every part of a deployment is taken; what it leaves open stays as the other options say."""
    spec = parse_deployment("name=a,role=canary,accept=0.5,k=2,arrivals=4,fix=on,pp=3,slots=8", DEFAULT, Path("/d"))
    assert spec == EngineSpec(
        "a",
        Path("/d/a/flight"),
        replace(DEFAULT.workload, accept=0.5, draft_tokens=2, arrivals=4.0, slots=8),
        role="canary",
        pp_size=3,
        fix=True,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("role=canary", "has no name"),
        ("name=a,role=boss", "one of baseline, canary, none"),
        ("name=a,accept=2", "a chance from 0 to 1"),
        ("name=a,accept=nan", "a chance from 0 to 1"),
        ("name=a,k=x", "draft tokens from 0 to 16"),
        ("name=a,fix=yes", "on or off"),
        ("name=a,pp=1", "from 2 to 16"),
        ("name=../a", "a word of letters"),
        ("name=a,name=b", "given twice"),
        ("name=a,speed=3", "KEY=VALUE with a KEY of name, role"),
        ("name=a,", "KEY=VALUE"),
    ],
)
def test_what_cannot_be_simulated_is_said(text: str, said: str) -> None:
    """A bad part is named together with what it may be."""
    with pytest.raises(OptionError, match=said):
        parse_deployment(text, DEFAULT, Path("/d"))


def test_default_is_a_baseline_and_a_canary_without_the_fix() -> None:
    """Without options there are two engines, alike but for their roles; `--healthy` starts both with the fix on."""
    assert [(spec.name, spec.role, spec.fix) for spec in specs()] == [
        ("baseline", "baseline", False),
        ("canary", "canary", False),
    ]
    assert all(spec.fix for spec in specs("--healthy"))
    assert specs("--hold", "7", "--restart-after", "3")[0].workload.hold_seconds == 7.0


def test_same_name_twice_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two deployments of one name end with status 2 and a sentence, before anything is started."""
    status = main(["--dir", str(tmp_path), "--deployment", "name=a", "--deployment", "name=a"])
    assert status == 2
    assert "the same name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--rate", "0"],
        ["--hold", "-1"],
        ["--hold", "inf"],
        ["--lull", "x"],
        ["--restart-after", "0"],
        ["--first-port", "70000"],
    ],
)
def test_figures_out_of_range_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A rate or time that cannot be is an error of the command line."""
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(argv)
    assert caught.value.code == 2
    assert f"{argv[0]}: {argv[1]} should be" in capsys.readouterr().err


def test_targets_are_yaml(tmp_path: Path) -> None:
    """The targets file is YAML with the deployments as a server wants them, and appears whole."""
    path = tmp_path / "targets.yaml"
    write_whole(path, render_targets([Target("a: b", "canary", "http://[::1]:9611", Path("/x y/token"))]))
    assert yaml.safe_load(path.read_text()) == {
        "deployments": [
            {"name": "a: b", "role": "canary", "exporters": ["http://[::1]:9611"], "control_token_file": "/x y/token"}
        ]
    }
    assert list(tmp_path.iterdir()) == [path]
