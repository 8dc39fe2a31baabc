"""Settings from file, environment and flags."""

from pathlib import Path

import pytest

from rankscope_server.domain.model import DeploymentRole
from rankscope_server.settings import ConfigError, control_token, describe_links, load_settings, parse_target


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "rankscope.yaml"
        path.write_text(text)
        return path

    return write


def test_deployments_come_from_the_file_and_from_targets(config):
    """Targets are added to those of the file."""
    path = config("port: 9000\ndeployments:\n  - name: chat\n    role: baseline\n    exporters: http://a:9610/\n")
    settings = load_settings(path, ["canary=b:9610,c:9610,role=canary,token-file=/run/token"])
    assert [(d.name, d.role, d.exporters) for d in settings.deployments] == [
        ("chat", DeploymentRole.BASELINE, ("http://a:9610",)),
        ("canary", DeploymentRole.CANARY, ("http://b:9610", "http://c:9610")),
    ]
    assert settings.deployments[1].control_token_file == Path("/run/token")
    assert settings.port == 9000


def test_flags_go_before_the_environment_and_that_before_the_file(config, monkeypatch):
    """Each can be overridden where it is closest to the person."""
    path = config("port: 9000\nretention_days: 3\n")
    monkeypatch.setenv("RANKSCOPE_SERVER_PORT", "9001")
    assert load_settings(path).port == 9001
    settings = load_settings(path, flags={"port": 9002})
    assert (settings.port, settings.retention_days) == (9002, 3)


def test_targets_are_added_to_deployments_of_the_environment(monkeypatch):
    """Nothing that was given is dropped."""
    monkeypatch.setenv("RANKSCOPE_SERVER_DEPLOYMENTS", '[{"name": "a", "exporters": ["http://a:1"]}]')
    assert [d.name for d in load_settings(None, ["b=http://b:1"]).deployments] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("deployments: [{name: chat}]", "deployments.0.exporters: is missing"),
        (
            "deployments: [{name: chat, exporters: [ftp://a]}]",
            "is no exporter address: write it like http://127.0.0.1:9610",
        ),
        ("deployments: [{name: chat, exporters: ['http://u:p@a:1']}]", "use control_token_file"),
        ("deployments: [{name: 'a b', exporters: [a]}]", "deployments.0.name: letters, digits"),
        ("deployments: [{name: chat, exporters: [a], colour: red}]", "deployments.0.colour: there is no such setting"),
        ("deployments: [{name: c, exporters: [a]}, {name: c, exporters: [b]}]", "'c' is there twice"),
        (
            "deployments: [{name: c, exporters: [a]}, {name: d, exporters: [a]}]",
            "an exporter belongs to one deployment",
        ),
        ("deployments: [{name: c, exporters: [a], role: boss}]", "deployments.0.role"),
        ("port: 99999", "port"),
        ("colour: red", "colour: there is no such setting; there are deployments, host, port"),
        ("alerts: {recievers: []}", "alerts.recievers: there is no such setting; do you mean receivers?"),
        (
            "alerts: {receivers: [{name: a, webhook: 'http://h', severties: critical}]}",
            "alerts.receivers.0.severties: there is no such setting; do you mean severities?",
        ),
        ("deployments: [{name: c, exporter: [a]}]", "do you mean exporters?"),
        ("alerts: {receivers: {name: ops}}", "alerts.receivers: is a list: begin each of its entries with `- `"),
        ("alerts: [ops]", "alerts: holds settings of its own: write each as `name: value` on a line below it"),
        ("- just\n- a list", "begin it with a line `deployments:`"),
        ("a: [", "not YAML"),
    ],
)
def test_what_cannot_be_used_is_said_with_file_field_and_remedy(config, text, words):
    """One line for each mistake."""
    path = config(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


def test_a_setting_with_nothing_after_it_is_not_set(config):
    """Everything below `alerts:` may be commented out."""
    settings = load_settings(config("deployments:\nalerts:\n  receivers:\n  hold_seconds:\n"))
    assert (settings.deployments, settings.receivers) == ((), ())


def test_links_in_alerts_lead_to_this_server_unless_it_is_told_another_address():
    """Which is said to those who have receivers, as others may not reach it."""

    def told(**flags):
        return describe_links(load_settings(flags=flags))

    assert told() == ""
    assert told(alertmanagers=("am",)).startswith(
        "links in alerts lead to http://127.0.0.1:8700: set alerts.external_url"
    )
    assert told(alertmanagers=("am",), port=0).startswith("alerts hold no links")
    assert told(alertmanagers=("am",), alerts={"external_url": "https://rankscope.example"}) == ""


def test_a_file_that_is_not_there_is_said_plainly(tmp_path: Path):
    """With its name and what to do."""
    with pytest.raises(ConfigError, match=r"missing.yaml: No such file or directory; name an existing file"):
        load_settings(tmp_path / "missing.yaml")


@pytest.mark.parametrize("text", ["chat", "=http://a", "chat=", "chat=role=canary"])
def test_a_target_that_is_none_is_refused(text):
    """With an example of one."""
    with pytest.raises(ConfigError, match="write it like chat=http"):
        parse_target(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "dashboard.example"])
def test_other_machines_need_a_password(host, tmp_path: Path):
    """No bind that others can reach without a password file."""
    with pytest.raises(ConfigError, match=r"rankscope password NAME"):
        load_settings(flags={"host": host})
    assert load_settings(flags={"host": host, "password_file": tmp_path / "users"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host):
    """This machine only."""
    assert load_settings(flags={"host": host}).host == host


def test_a_token_file_is_for_its_owner_only(tmp_path: Path):
    """Others could toggle otherwise."""
    path = tmp_path / "token"
    path.write_text("a-token\n")
    path.chmod(0o640)
    deployment = load_settings(None, [f"chat=http://a:1,token-file={path}"]).deployments[0]
    with pytest.raises(ConfigError, match=r"can be read by others: chmod 600"):
        control_token(deployment)
    path.chmod(0o600)
    assert control_token(deployment) == "a-token"
