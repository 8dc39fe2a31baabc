"""
The main job end to end on real vLLM, through exporter and server: what the end-to-end runs print must hold.

Figures that are times are printed by the runs and judged there; here only content, order and correctness count.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "e2e" / "run.py"
TIMES = {"detect_seconds"}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("lab_checkpoints")
@pytest.mark.parametrize("run", ["baseline", "canary", "mid-drift"])
def test_the_main_job(run: str) -> None:
    """Baseline drifts, goes wrong, wedges and stays readable; the canary stays right; the fix turned on mid-drift ends the drift in one step."""
    done = subprocess.run([sys.executable, str(RUN), run], capture_output=True, text=True, check=False)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    missed = [figure for figure in figures if not figure["ok"] and figure["figure"] not in TIMES]
    assert figures, done.stderr[-3000:]
    assert done.returncode == any(not figure["ok"] for figure in figures), f"ended early: {done.stderr[-3000:]}"
    assert not missed, f"{json.dumps(missed, indent=1)}\n{done.stderr[-3000:]}"
