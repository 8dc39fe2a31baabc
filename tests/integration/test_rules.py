"""
The Prometheus rules: valid for Prometheus and vmalert, true to the exporter's contract, each alert with cases for and against.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import complaints, groupings, recorded, selectors
from tools import need

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rankscope.rules.yml"
CASES = sorted((Path(__file__).parent / "rules").glob("*.yml"))
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
ALL: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in ALL if "alert" in rule]
RECORDS = [rule for rule in ALL if "record" in rule]


def name_of(rule: dict[str, Any]) -> str:
    """A rule's name as tests show it."""
    return str(rule.get("alert") or rule.get("record"))


def run(*command: str) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_rules() -> None:
    """Neither an error is found by promtool, nor anything to remark."""
    printed = run(need("promtool", "prometheus"), "check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert f"SUCCESS: {len(ALL)} rules found" in printed


def test_vmalert_takes_the_rules() -> None:
    """VictoriaMetrics' vmalert accepts the same file."""
    run(need("vmalert", "victoria-metrics"), "-dryRun", f"-rule={RULES}")


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(case: Path) -> None:
    """What promtool computes from the cases is what they say."""
    run(need("promtool", "prometheus"), "test", "rules", str(case))


@pytest.mark.parametrize("rule", ALL, ids=name_of)
def test_rules_ask_for_what_there_is(rule: dict[str, Any]) -> None:
    """Every metric, label and fixed value in a rule is in the exporter's contract, or was recorded by a rule before it."""
    expression = rule["expr"]
    assert not list(complaints(expression, frozenset({"alertname", "severity", "subject"})))
    earlier = [name_of(other) for other in ALL[: ALL.index(rule)]]
    assert recorded(expression) <= set(earlier)
    assert selectors(expression) or recorded(expression)


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("max(rankscope_drift) > 0", "rankscope_drift does not exist"),
        ('rankscope_steps_total{reason="x"}', "rankscope_steps_total has no label reason"),
        ('rankscope_rank_life{life=~"gone|dead"}', "rankscope_rank_life never has life=~'gone|dead'"),
        ("sum by (engine, rank) (rankscope_masked_requests)", "nothing has the label rank"),
        ("sum by (le) (rankscope_own_step_seconds_bucket)", ""),
    ],
)
def test_what_there_is_not_is_found(expression: str, complaint: str) -> None:
    """An expression that asks for something that the contract lacks is told so."""
    assert list(complaints(expression)) == ([complaint] if complaint else [])


@pytest.mark.parametrize("rule", RECORDS, ids=name_of)
def test_recorded_names_tell_their_level(rule: dict[str, Any]) -> None:
    """Recorded metrics are named level:metric:operation, and what is of an engine has exactly an engine's labels."""
    level, _, operation = rule["record"].split(":")
    assert re.fullmatch(r"[a-z_]+", operation)
    assert level in {"engine", "engine_instance", "engine_stage", "rank"}
    if level == "engine":
        assert {"deployment", "engine", "dp_rank"} <= groupings(rule["expr"]) or recorded(rule["expr"])


@pytest.mark.parametrize("rule", ALERTS, ids=name_of)
def test_alerts_say_what_a_person_needs(rule: dict[str, Any]) -> None:
    """An alert has a severity, a summary, a description with its value, and the address of the runbook of its name."""
    assert re.fullmatch(r"Rankscope([A-Z][a-z]+)+", rule["alert"])
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    told = rule["annotations"]
    assert set(told) == {"summary", "description", "runbook_url"}
    assert "$value" in told["description"]
    assert not told["summary"].endswith(".")
    assert told["runbook_url"].endswith(f"/runbooks/{rule['alert']}")


def test_every_alert_has_cases_for_and_against() -> None:
    """Each alert is expected to fire in some case, and there are cases in which nothing fires."""
    texts = [case.read_text(encoding="utf-8") for case in CASES]
    expected = {name for text in texts for name in re.findall(r"\{labels: '\{alertname=\"(\w+)\"", text)}
    assert expected == {name_of(rule) for rule in ALERTS}
    silent = [
        test["name"]
        for text in texts
        for test in yaml.safe_load(text)["tests"]
        if not any(asked.get("exp_samples") for asked in test["promql_expr_test"])
    ]
    assert len(silent) >= 10


def test_an_alert_stays_while_its_exporter_is_silent() -> None:
    """Drift and all critical alerts of an engine are held while one of its exporters does not answer."""
    held = {
        name_of(rule) for rule in ALERTS if f'engine:rankscope_alerts:held{{alertname="{rule["alert"]}"' in rule["expr"]
    }
    critical = {name_of(rule) for rule in ALERTS if rule["labels"]["severity"] == "critical"}
    assert held == critical - {"RankscopeNcclMismatch"} | {"RankscopeDrift"}


def test_runbooks_can_be_elsewhere(tmp_path: Path) -> None:
    """The script prints the same rules with another address of the runbooks, and refuses what is no address."""
    script = ROOT / "deploy" / "prometheus" / "set-runbook-url.sh"
    printed = run("sh", str(script), "https://wiki.example.org/a&b|c/runbooks/")
    urls = re.findall(r"runbook_url: (\S+)", printed)
    assert len(urls) == len(ALERTS)
    assert all(url.startswith("https://wiki.example.org/a&b|c/runbooks/Rankscope") for url in urls)
    assert "127.0.0.1" not in printed
    (tmp_path / "rules.yml").write_text(printed, encoding="utf-8")
    run(need("promtool", "prometheus"), "check", "rules", str(tmp_path / "rules.yml"))
    refused = subprocess.run(["sh", str(script), "wiki"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "http" in refused.stderr


def test_the_page_lists_every_alert() -> None:
    """The page about Prometheus has each alert with its severities, linked to its runbook."""
    page = (ROOT / "docs" / "prometheus.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| \[(\w+)\]\(runbooks/\1\.md\) \| ([a-z, ]+) \|", page, flags=re.MULTILINE)
    severities: dict[str, list[str]] = {}
    for rule in ALERTS:
        known = severities.setdefault(rule["alert"], [])
        known += {rule["labels"]["severity"]} - set(known)
    assert dict(told) == {name: ", ".join(known) for name, known in severities.items()}
