"""`rankscope alert` and what `check-config` says of receivers."""

import re
from pathlib import Path

import pytest
import yaml
from catching import catching
from typer.testing import CliRunner

from rankscope_server.cli import cli
from rankscope_server.domain.alert_rules import RULES
from rankscope_server.notify.webhook import PREFIX


def run(*arguments: str):
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def config(tmp_path: Path):
    """Writes a file with receivers; a webhook has its secret beside it."""

    def write(*receivers: dict) -> str:
        secret = tmp_path / "secret"
        secret.write_text(run("alert", "secret").output)
        secret.chmod(0o600)
        made = [{**one, "secret_file": str(secret)} if "webhook" in one else one for one in receivers]
        path = tmp_path / "rankscope.yaml"
        deployments = [{"name": "chat", "exporters": ["a:9610"]}]
        path.write_text(yaml.safe_dump({"deployments": deployments, "alerts": {"receivers": made}}))
        return str(path)

    return write


def test_every_receiver_is_tried(config):
    """With a marked alert, firing and then resolved, whatever it is for; each says how long it took."""
    with catching() as one, catching() as two:
        path = config(
            {"name": "pager", "webhook": f"{one.url}/hook", "severities": ["critical"]},
            {"name": "ops", "alertmanager": two.url, "deployments": ["chat"]},
        )
        result = run("alert", "test", "--config", path)
    assert result.exit_code == 0, result.output
    pager, ops = result.output.splitlines()
    assert re.fullmatch(r"pager \(webhook, http://127\.0\.0\.1:\d+/\.\.\.\): took it firing in [\d.]+ s and resolved in [\d.]+ s", pager)  # fmt: skip
    assert ops.startswith(f"ops (alertmanager, {two.url}): took it firing in")
    assert [request.json()["type"] for request in one.caught] == ["alert.firing", "alert.resolved"]
    assert {request.json()["data"]["test"] for request in one.caught} == {True}
    assert [request.json()[0]["labels"]["alertname"] for request in two.caught] == ["RankscopeTest"] * 2


def test_one_receiver_can_be_chosen_and_a_severity(config):
    """By its name in the settings."""
    with catching() as one, catching() as two:
        path = config({"name": "pager", "webhook": one.url}, {"name": "ops", "alertmanager": two.url})
        result = run("alert", "test", "--config", path, "--receiver", "ops", "--severity", "critical")
    assert result.exit_code == 0, result.output
    assert one.caught == []
    assert two.caught[0].json()[0]["labels"]["severity"] == "critical"


def test_one_that_does_not_take_it_says_why(config):
    """Exit status 1; the others are told all the same."""
    with catching() as good, catching() as bad:
        bad.status = 401
        path = config({"name": "bad", "alertmanager": bad.url}, {"name": "good", "alertmanager": good.url})
        result = run("alert", "test", "--config", path)
    assert result.exit_code == 1
    assert "bad (alertmanager" in result.output
    assert "did not take the alert: it answers 401: it does not take the credentials" in result.output
    assert len(good.caught) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no receiver to try: name one with --alertmanager URL"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: No such file"),
        (["--alertmanager", "ftp://a"], "write it like http://127.0.0.1:9093"),
        (
            ["--alertmanager", "a", "--receiver", "ops"],
            "there is no receiver 'ops'; those of the settings: alertmanager",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_one_line(arguments, words):
    """Exit status 2."""
    result = run("alert", "test", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert words in result.stderr


def test_rules_are_listed_with_the_times_that_hold(tmp_path: Path):
    """Those that were set, too."""
    path = tmp_path / "rankscope.yaml"
    path.write_text("alerts: {hold_seconds: {RankscopeBlind: 77}}")
    result = run("alert", "rules", "--config", str(path))
    assert result.exit_code == 0
    for name in RULES:
        assert f"{name}\n" in result.output
    assert "warning; fires after 77 s, is resolved 30 s after its end" in result.output


def test_a_secret_is_new_each_time():
    """And in the form that receivers of webhooks know."""
    one, two = run("alert", "secret").output, run("alert", "secret").output
    assert one.startswith(PREFIX)
    assert one != two


def test_check_config_tells_who_hears_of_what(config):
    """And finds files that cannot be used."""
    path = config(
        {"name": "pager", "webhook": "https://h.example/T0K3N", "severities": "critical"},
        {"name": "ops", "alertmanager": ["am-1:9093", "am-2:9093"], "deployments": "chat"},
    )
    result = run("check-config", path)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[1:] == [
        "alerts (critical) go to pager: webhook, https://h.example/...",
        "alerts (warning and critical of chat) go to ops am-1:9093: alertmanager, http://am-1:9093",
        "alerts (warning and critical of chat) go to ops am-2:9093: alertmanager, http://am-2:9093",
        "links in alerts lead to http://127.0.0.1:8700: set alerts.external_url if people reach this server under another address",
    ]
    path = config({"name": "ops", "alertmanager": "a", "bearer_token_file": "/nowhere/token"})
    result = run("check-config", path)
    assert result.exit_code == 2
    assert "receiver ops: bearer token file /nowhere/token: No such file" in result.stderr
