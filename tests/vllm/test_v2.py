"""
The V2 runner on real vLLM: what the end-to-end runs print must hold.

Figures that are times are printed by the runs and judged there; here only content, order and correctness count.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "e2e" / "run_v2.py"
TIMES = {"detect_seconds"}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("lab_v2_python")
@pytest.mark.parametrize(
    ("run", "outside"),
    [
        pytest.param("ngram_gpu", "1", id="ngram_gpu, the trace around Rankscope"),
        pytest.param("fault", "0", id="fault, the trace within"),
    ],
)
def test_the_v2_runner(run: str, outside: str) -> None:
    """With aborts and preemption the flight files say what vLLM computed, and no token differs; a rank that fails is found with step and phase."""
    environment = {**os.environ, "RANKSCOPE_LAB_TRACE_OUTSIDE": outside}
    done = subprocess.run([sys.executable, str(RUN), run], capture_output=True, text=True, check=False, env=environment)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    missed = [figure for figure in figures if not figure["ok"] and figure["figure"] not in TIMES]
    assert figures, done.stderr[-3000:]
    assert done.returncode == any(not figure["ok"] for figure in figures), f"ended early: {done.stderr[-3000:]}"
    assert not missed, f"{json.dumps(missed, indent=1)}\n{done.stderr[-3000:]}"
