"""
Settings of the exporter process.
"""

from pathlib import Path

import pytest
from pydantic import ValidationError

from rankscope_exporter.serve.settings import ServeSettings, SettingsError
from rankscope_exporter.serve.tokens import read_control_token

LONG = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _clean(serve_settings: ServeSettings) -> None:
    """No `RANKSCOPE_*` from outside."""


def token_file(path: Path, mode: int, text: str = LONG + "\n") -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_defaults() -> None:
    """Loopback, port 9610, control off."""
    settings = ServeSettings()

    assert (settings.host, settings.port, str(settings.flight_dir), settings.loopback) == (
        "127.0.0.1",
        9610,
        "/dev/shm/rankscope",
        True,
    )
    assert read_control_token(settings) is None


def test_environment_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment fills in what flags leave open; an empty variable is as good as none."""
    monkeypatch.setenv("RANKSCOPE_PORT", "1234")
    monkeypatch.setenv("RANKSCOPE_HOST", "0.0.0.0")
    monkeypatch.setenv("RANKSCOPE_CONTROL_TOKEN", "")

    settings = ServeSettings(host="::1")

    assert (settings.port, settings.host, settings.loopback) == (1234, "::1", True)
    assert read_control_token(settings) is None


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_token_file(tmp_path: Path, mode: int) -> None:
    """A token is read from a file that only its owner and its group can read."""
    assert read_control_token(ServeSettings(control_token_file=token_file(tmp_path / "token", mode))) == LONG


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_token_file_of_everybody(tmp_path: Path, mode: int) -> None:
    """A token file that others can read or write is refused, with the command that repairs it."""
    with pytest.raises(SettingsError, match=r"chmod 600 .*token"):
        read_control_token(ServeSettings(control_token_file=token_file(tmp_path / "token", mode)))


def test_missing_token_file(tmp_path: Path) -> None:
    """A token file that is not there does not turn control off in silence."""
    with pytest.raises(SettingsError, match="No such file"):
        read_control_token(ServeSettings(control_token_file=tmp_path / "missing"))


@pytest.mark.parametrize("text", ["", "short", "with a space in between", "gar nicht üblich"])
def test_weak_token(tmp_path: Path, text: str) -> None:
    """A token that is empty, short or odd is refused, with a command that makes a good one."""
    with pytest.raises(SettingsError, match="token_urlsafe"):
        read_control_token(ServeSettings(control_token_file=token_file(tmp_path / "token", 0o600, text)))


def test_two_tokens(tmp_path: Path) -> None:
    """Two sources of one secret are a mistake."""
    with pytest.raises(SettingsError, match="keep one"):
        read_control_token(ServeSettings(control_token=LONG, control_token_file=token_file(tmp_path / "token", 0o600)))


def test_token_does_not_print() -> None:
    """A token does not appear when settings are printed."""
    assert LONG not in repr(ServeSettings(control_token=LONG))


@pytest.mark.parametrize(("name", "value"), [("port", 70000), ("retention_seconds", -1), ("port", "x")])
def test_out_of_range(name: str, value: object) -> None:
    """What cannot be is refused."""
    with pytest.raises(ValidationError, match=name):
        ServeSettings(**{name: value})
