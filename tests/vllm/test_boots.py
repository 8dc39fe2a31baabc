"""
Stock vLLM, booted as it was released: Rankscope's metrics say what the run did.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope_lab.boots import BOOTS, Boot, samples_of

RUN = Path(__file__).parents[1] / "e2e" / "run_boots.py"


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("lab_python")
def test_stock_v1_with_spawned_workers() -> None:
    """Two pipeline ranks of stock V1, spawned: identities, steps, requests, tokens, guard decisions and metrics are those of the run."""
    done = subprocess.run([sys.executable, str(RUN), "v1-0.27.1"], capture_output=True, text=True, check=False)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    missed = [figure for figure in figures if not figure["ok"]]
    assert figures, done.stderr[-3000:]
    assert not missed, f"{json.dumps(missed, indent=1)}\n{done.stderr[-3000:]}"


def test_a_boot_knows_which_ranks_there_must_be() -> None:
    """Every replica has each tensor rank of each pipeline rank."""
    assert Boot("any", "0.27.1", tensor_ranks=2).places() == {(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)}
    assert Boot("any", "0.27.1", pipeline_ranks=1, replicas=2).places() == {(0, 0, 0), (1, 0, 0)}
    assert len({boot.name for boot in BOOTS}) == len(BOOTS)


def test_samples_are_those_with_nothing_but_a_rank() -> None:
    """A state among others, or a sample of the node, is not a rank's value."""
    rank = 'engine="e",dp_rank="0",pp_rank="1",tp_rank="0"'
    text = f'# TYPE a counter\na_total{{{rank}}} 7\n# TYPE b gauge\nb{{{rank},state="on"}} 1\n# TYPE c gauge\nc 3\n'
    assert samples_of(text) == {(0, 1, 0): {"a_total": 7.0}}


def test_an_unknown_boot_is_refused() -> None:
    """A name that is no boot ends with the list of those that are."""
    done = subprocess.run([sys.executable, str(RUN), "v9"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "v1-0.27.1" in done.stderr
