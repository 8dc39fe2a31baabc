"""
The runbooks: one for each alert, whoever says it, all of one shape.
"""

import re
from pathlib import Path

import pytest
import yaml

from rankscope_server.domain.alert_rules import RULES

ROOT = Path(__file__).parents[2]
RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
GROUPS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rankscope.rules.yml").read_text(encoding="utf-8"))["groups"]
IN_PROMETHEUS = {rule["alert"] for group in GROUPS for rule in group["rules"] if "alert" in rule}

each = pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)


def test_every_alert_has_a_runbook() -> None:
    """Each alert of the rules and of the server has one, and there is none besides."""
    assert {path.stem for path in RUNBOOKS} == IN_PROMETHEUS | set(RULES)


@each
def test_runbook_has_its_parts(path: Path) -> None:
    """It is titled by the alert, and says meaning, impact, diagnosis and mitigation, in this order."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {path.stem}\n")
    sections = dict(re.findall(r"^## (.+)\n\n((?:.|\n)+?)(?=^## |\Z)", text, flags=re.MULTILINE))
    assert list(sections) == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
    assert "```sh\n" in sections["Diagnosis"]
    assert len(text.splitlines()) <= 60


@each
def test_runbook_says_who_says_it(path: Path) -> None:
    """Its first sentences name the severities of the alert and where it comes from."""
    told = path.read_text(encoding="utf-8").splitlines()[2]
    rules = [rule for group in GROUPS for rule in group["rules"] if rule.get("alert") == path.stem]
    severities = {rule["labels"]["severity"] for rule in rules}
    if path.stem in RULES:
        severities |= {severity.value for severity in RULES[path.stem].severities}
    assert set(re.findall(r"\b(critical|warning|info)\b", told)) == severities
    assert ("Said by the Prometheus rules" in told) == (path.stem in IN_PROMETHEUS)
    assert ("dashboard server" in told.partition(". The")[0]) == (path.stem in RULES)


@each
def test_runbook_asks_the_exporter_for_what_it_has(path: Path) -> None:
    """Addresses that it has a person fetch are the exporter's."""
    paths = re.findall(r"127\.0\.0\.1:9610(/[\w/]+)", path.read_text(encoding="utf-8"))
    assert set(paths) <= {"/metrics", "/healthz", "/v1/ranks", "/v1/requests"}
