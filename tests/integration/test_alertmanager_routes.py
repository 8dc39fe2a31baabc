"""
The Alertmanager example: valid, and each alert goes where its severity says.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import need

pytestmark = pytest.mark.integration

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIG = DEPLOY / "alertmanager" / "alertmanager.yml"
GROUPS = yaml.safe_load((DEPLOY / "prometheus" / "rankscope.rules.yml").read_text(encoding="utf-8"))["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
RECEIVERS = {"critical": "page", "warning": "ticket", "info": "nobody"}


def amtool(*arguments: str) -> str:
    """What amtool prints; it has to succeed."""
    command = [need("amtool", "prometheus-alertmanager"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alertmanager_takes_its_configuration() -> None:
    """Alertmanager's own tool finds nothing wrong."""
    assert "SUCCESS" in amtool("check-config", str(CONFIG))


@pytest.mark.parametrize("severity", RECEIVERS)
def test_severity_decides_who_is_told(severity: str) -> None:
    """Critical alerts page, warnings make a ticket, and what is for information tells nobody."""
    name = next(rule["alert"] for rule in ALERTS if rule["labels"]["severity"] == severity)
    route = ("config", "routes", "test", f"--config.file={CONFIG}", f"--verify.receivers={RECEIVERS[severity]}")
    amtool(*route, f"alertname={name}", f"severity={severity}", "engine=e")


def test_what_is_silenced_is_said_by_something_worse() -> None:
    """Inhibition is among alerts of one engine, silences no critical alert, and names only alerts that there are."""
    known = {rule["alert"] for rule in ALERTS} | {"RankscopeForecast"}
    critical = {rule["alert"] for rule in ALERTS if rule["labels"]["severity"] == "critical"} - {"RankscopeStalled"}
    rules: list[dict[str, Any]] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["inhibit_rules"]
    for rule in rules:
        assert rule["equal"] == ["deployment", "engine"]
        sources, targets = (
            {name for matcher in rule[f"{side}_matchers"] for name in matcher.split("=")[-1].strip(' ~"').split("|")}
            - set(RECEIVERS)
            for side in ("source", "target")
        )
        assert sources | targets <= known
        assert not targets & critical
