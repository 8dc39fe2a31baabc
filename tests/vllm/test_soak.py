"""
The soak in its short form: what its figures say must hold.

Figures that are times are printed by the run and judged there; here only content, order and correctness count.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "soak" / "run.py"
TIMES = {
    "first_answer_seconds_max",
    "flight_files_removed_seconds_max",
    "gone_seen_seconds_max",
    "resumed_seconds_max",
    "stopped_seen_seconds_max",
}

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.usefixtures("lab_checkpoints")
def test_a_short_soak() -> None:
    """Through restarts of exporter and vLLM, a full file system and a stopped rank: right tokens, no gap unreported, nothing left."""
    done = subprocess.run([sys.executable, str(RUN), "--minutes", "2"], capture_output=True, text=True, check=False)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    missed = [figure for figure in figures if not figure["ok"] and figure["figure"] not in TIMES]
    assert figures, done.stderr[-3000:]
    assert done.returncode == any(not figure["ok"] for figure in figures), f"ended early: {done.stderr[-3000:]}"
    assert not missed, f"{json.dumps(missed, indent=1)}\n{done.stderr[-3000:]}"
