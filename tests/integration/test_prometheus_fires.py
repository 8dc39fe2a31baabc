"""
From flight files to Alertmanager, with nothing simulated but vLLM: exporters, Prometheus and Alertmanager are real.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus import ToolMissingError, alerts_at, ask_prometheus, start_alertmanager, start_prometheus

pytestmark = pytest.mark.integration

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rankscope.rules.yml"
START_SECONDS = 60.0
WEDGE_SECONDS = 150.0
"""Far more than it takes on a machine that has nothing else to do: a third of that."""


@pytest.fixture
def exporters(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Exporters, by deployment, of an engine that drifts and wedges and of one beside it that has the fix on."""
    targets = tmp_path / "targets.yaml"
    command = [
        str(Path(sys.executable).with_name("rankscope-exporter")), "simulate", "--deployment=name=parting,fix=off",
        "--deployment=name=fixed,fix=on", "--hold=20", "--lull=20", f"--targets-file={targets}",
    ]  # fmt: skip
    with (tmp_path / "simulation.log").open("w", encoding="utf-8") as log:
        simulation = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not targets.is_file() and simulation.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert targets.is_file(), (tmp_path / "simulation.log").read_text(encoding="utf-8")
        deployments = yaml.safe_load(targets.read_text(encoding="utf-8"))["deployments"]
        yield {deployment["name"]: deployment["exporters"][0] for deployment in deployments}
    finally:
        simulation.terminate()
        simulation.wait(30)


def skip_without(error: ToolMissingError) -> None:
    """Skip, or fail where nothing may be missing."""
    if os.environ.get("RANKSCOPE_REQUIRE_ALL"):
        pytest.fail(str(error))
    pytest.skip(str(error))


def test_a_wedge_reaches_alertmanager_and_a_healthy_engine_does_not(exporters: dict[str, str], tmp_path: Path) -> None:
    """Drift arrives, then the guards' disagreement, then the wedge, all of the engine that parts; its neighbour gives none."""
    arrived: list[str] = []
    try:
        with (
            start_alertmanager(tmp_path) as alertmanager,
            start_prometheus(exporters, alertmanager, RULES, tmp_path) as prometheus,
        ):
            deadline = time.monotonic() + WEDGE_SECONDS
            while "RankscopeWedged" not in arrived and time.monotonic() < deadline:
                for labels in alerts_at(alertmanager):
                    assert labels["deployment"] == "parting", labels
                    if labels["alertname"] not in arrived:
                        arrived.append(labels["alertname"])
                time.sleep(0.2)
            watched = ask_prometheus(prometheus, "count by (deployment) (rankscope_rank_info)")
            held = ask_prometheus(prometheus, 'count(ALERTS{deployment="fixed"})')
    except ToolMissingError as error:
        skip_without(error)
    expected = ["RankscopeDrift", "RankscopeGuardDisagreement", "RankscopeWedged"]
    assert [name for name in arrived if name in expected] == expected
    assert set(arrived) <= {*expected, "RankscopeMaskDisagreement"}
    assert {labels["deployment"]: count for labels, count in watched} == {"parting": 2.0, "fixed": 2.0}
    assert held == []
