"""
The Grafana dashboards: what they ask for exists, Prometheus can read it, and they lead to each other.
"""

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import complaints, recorded, selectors
from tools import need

pytestmark = pytest.mark.integration

DEPLOY = Path(__file__).parents[2] / "deploy"
PATHS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
DASHBOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in PATHS}
GROUPS = yaml.safe_load((DEPLOY / "prometheus" / "rankscope.rules.yml").read_text(encoding="utf-8"))["groups"]
RECORDED = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
SEVERAL = {"deployment", "dp_rank"}
"""Variables that may stand for several values, or for all."""

each = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    """Every expression of a dashboard: those of its panels, its annotations and its variables."""
    for panel in panels(dashboard):
        yield from (target["expr"] for target in panel["targets"])
    yield from (note["expr"] for note in dashboard["annotations"]["list"] if "expr" in note)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert found is not None
            yield f"group by ({found[2]}) ({found[1]})"


def test_there_is_one_for_each_level() -> None:
    """There are dashboards of the fleet, of an engine and of a rank."""
    assert set(DASHBOARDS) == {"fleet", "engine", "rank"}


@each
def test_expressions_ask_for_what_there_is(dashboard: dict[str, Any]) -> None:
    """Metrics, labels and fixed values are those of the exporter's contract, or of the rules."""
    more = frozenset({"alertname", "severity"})
    for expression in expressions(dashboard):
        assert not list(complaints(expression, more)), expression
        assert recorded(expression) <= RECORDED
        assert selectors(expression) or recorded(expression)


def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    """With variables filled in, promtool takes each expression as that of a rule."""
    promtool = need("promtool", "prometheus")
    texts = [text for dashboard in DASHBOARDS.values() for text in expressions(dashboard)]
    filled = [re.sub(r"\$(\w+)", "0", text.replace("$__rate_interval", "1m")) for text in texts]
    rules = [{"record": f"expression:{number}", "expr": text} for number, text in enumerate(filled)]
    path = tmp_path / "expressions.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run(
        [promtool, "check", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rules) > 60


@each
def test_dashboards_take_any_data_source(dashboard: dict[str, Any]) -> None:
    """The data source is a variable, everywhere; so are deployment and engine."""
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names[:2] == ["datasource", "deployment"]
    for panel in panels(dashboard):
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
    for expression in expressions(dashboard):
        for name in re.findall(r"\$(?!__)(\w+)", expression):
            assert name in names
            operator = "=~" if name in SEVERAL else "="
            assert f'{name}{operator}"${name}"' in expression, expression


@each
def test_panels_have_their_place(dashboard: dict[str, Any]) -> None:
    """Ids and titles are unique, no panel lies on another, each says what is unknown."""
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(set(titles)) == len(titles)
    for one, other in itertools.combinations([panel["gridPos"] for panel in dashboard["panels"]], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    for panel in panels(dashboard):
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["noValue"] in {"unknown", "none"}


@each
def test_nothing_is_green_that_is_not_known(dashboard: dict[str, Any]) -> None:
    """No number is made up where there is no data: a zero comes from something that was scraped."""
    for expression in expressions(dashboard):
        assert "vector(" not in expression


@each
def test_links_lead_to_dashboards(dashboard: dict[str, Any]) -> None:
    """Links among the dashboards lead to those that there are."""
    known = {other["uid"] for other in DASHBOARDS.values()}
    linked = set(re.findall(r"/d/([\w-]+)", json.dumps(dashboard)))
    assert linked
    assert linked <= known - {dashboard["uid"]}


def test_provisioning_finds_the_dashboards() -> None:
    """The example loads the folder that docker-compose.yml puts there."""
    provisioning = DEPLOY / "grafana" / "provisioning"
    provider = yaml.safe_load((provisioning / "dashboards" / "rankscope.yml").read_text(encoding="utf-8"))["providers"][
        0
    ]
    source = yaml.safe_load((provisioning / "datasources" / "rankscope.yml").read_text(encoding="utf-8"))[
        "datasources"
    ][0]
    services = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
