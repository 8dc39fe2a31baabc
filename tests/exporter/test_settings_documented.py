"""
Every setting of the exporter process can be given as the page on the exporter says: by flag, or in the environment.
"""

import os
import re
from pathlib import Path

import pytest

from rankscope_exporter.cli import build_parser
from rankscope_exporter.serve.settings import ServeSettings
from rankscope_exporter.settings import WorkerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "exporter.md").read_text(encoding="utf-8")
SECRET = {"read_token", "control_token"}
"""Other users of a machine can see flags, so these have none."""
TEST_ONLY = {"fault_injection"}


def flags_of(command: str) -> set[str]:
    """The flags that a command takes."""
    arguments = ["serve"] if command == "serve" else ["run", "--", "true"]
    return {f"--{name.replace('_', '-')}" for name in vars(build_parser().parse_args(arguments))}


@pytest.mark.parametrize("command", ["serve", "run"])
def test_each_setting_is_a_flag(command: str) -> None:
    """Every setting of the process but the secret ones is a flag of both commands."""
    wanted = {f"--{name.replace('_', '-')}" for name in ServeSettings.model_fields if name not in SECRET}

    assert wanted <= flags_of(command)
    assert not {f"--{name.replace('_', '-')}" for name in SECRET} & flags_of(command)


def test_each_variable_of_the_page_is_a_setting() -> None:
    """The page names no variable that nothing reads, and leaves out none but the one for tests."""
    settings = {*ServeSettings.model_fields, *WorkerSettings.model_fields} - TEST_ONLY

    assert set(re.findall(r"RANKSCOPE_[A-Z_]+", PAGE)) == {f"RANKSCOPE_{name.upper()}" for name in settings}


@pytest.mark.parametrize("settings", [WorkerSettings, ServeSettings])
def test_each_variable_is_read(settings: type[WorkerSettings] | type[ServeSettings], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A setting that is given in the environment is the one that is used."""
    for name in [name for name in os.environ if name.startswith("RANKSCOPE_")]:
        monkeypatch.delenv(name)
    defaults = settings()
    for name, field in settings.model_fields.items():
        default = getattr(defaults, name)
        other = {bool: "false", int: "77", float: "77"}.get(type(default), "other")
        other = {"trim_fix": "on", "request_ids": "omitted", "nccl_ras": "off"}.get(name, other)
        with monkeypatch.context() as patch:
            patch.setenv(f"RANKSCOPE_{name.upper()}", other)

            assert getattr(settings(), name) != default, (name, field)
