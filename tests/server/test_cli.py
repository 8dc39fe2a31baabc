"""The command `rankscope`."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from rankscope_server.cli import cli
from rankscope_server.settings import ServerSettings


def run(*arguments: str, **more):
    return CliRunner().invoke(cli, list(arguments), **more)


def test_help_names_every_command():
    """A person finds the way."""
    for word in ("serve", "password", "check-config", "replay"):
        assert word in run("--help").output
    assert re.match(r"rankscope \d", run("--version").output)


def test_a_configuration_is_checked_and_told(tmp_path: Path):
    """What would be watched, and whether it can be toggled."""
    path = tmp_path / "rankscope.yaml"
    path.write_text("deployments:\n  - {name: chat, role: canary, exporters: [a:9610]}\n")
    result = run("check-config", str(path))
    assert result.exit_code == 0
    assert result.output == "chat (canary, read only: no control token): http://a:9610\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--config", "/nowhere/rankscope.yaml"], "/nowhere/rankscope.yaml: No such file or directory"),
        (["serve", "--target", "chat"], "write it like chat=http"),
        (["serve", "--host", "0.0.0.0"], "no password file is set"),
        (["serve", "--password-file", "/nowhere/users"], "password file /nowhere/users: No such file"),
        (
            ["check-config", "--target", "chat=http://a:1,token-file=/nowhere/token"],
            "control token file /nowhere/token",
        ),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(arguments, words):
    """Exit status 2, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_said_plainly(tmp_path: Path):
    """Before anything is polled."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port), "--data-dir", str(tmp_path))
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; another server is there" in result.stderr


def test_a_password_line_is_made_from_standard_input():
    """So that scripts can do it; the password itself is nowhere in it."""
    result = run("password", "ada", input="correct horse\n")
    assert result.exit_code == 0
    assert result.output.startswith("ada:$argon2id$")
    assert "correct" not in result.output
    assert run("password", "ada", input="short\n").exit_code == 2


def test_every_setting_can_be_given_in_the_environment():
    """The prefix is the same for all."""
    assert ServerSettings.model_config["env_prefix"] == "RANKSCOPE_SERVER_"


@pytest.mark.integration
def test_the_server_starts_says_where_and_ends_on_a_signal(tmp_path: Path):
    """One line with its address; an open stream does not hold it up; exit status 0."""
    command = [sys.executable, "-m", "rankscope_server", "serve", "--port", "0", "--data-dir", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            line = server.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+/", line)
            assert url, line + server.stderr.read()
            assert "no deployment yet (add one with --target" in line
            assert httpx2.get(url[0] + "healthz", trust_env=False, timeout=30).json()["ok"] is True
            assert httpx2.get(url[0], trust_env=False, timeout=30).status_code == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=30) in {0, -signal.SIGTERM}
        finally:
            server.kill()
