"""
One run of the V2 runner, and everything that is known of it afterwards.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab"))

from evidence import RankEvidence, read_ranks

from rankscope_lab import environment
from rankscope_lab.v2 import models, trace
from rankscope_lab.v2.launch import OfflineRun, Options
from rankscope_lab.v2.offline import Settings

METHODS = ("none", "ngram_gpu", "eagle3")
DRAFT_TOKENS = 3
RING_STEPS = 1 << 14
"""
More steps than any run here has: the comparison wants every one of them.
"""
SETTINGS = Settings(target="", draft_tokens=DRAFT_TOKENS, requests=24, seed=54273, slots=6, context=160, blocks=8)
"""
Requests of up to five KV blocks, six at a time, in eight blocks: some must be preempted. With this seed the first prompt
fills the first step alone, and nothing of it is needed: every run has a guard that skips.
"""


@dataclass(frozen=True, slots=True)
class V2Run:
    """
    What a run said of itself, what its ranks' flight files say, and what the trace has (by pipeline rank).
    """

    facts: dict[str, Any]
    ranks: list[RankEvidence]
    trace: dict[int, list[dict[str, Any]]]


def options(work: Path, method: str, *, settings: Settings, enabled: bool = True, **extra: str) -> Options:
    """
    How a method is run with its traces and flight files below `work`; without Rankscope, without a trace too.
    """
    lab = environment.default_v2(os.environ)
    found = models.ensure(environment.REPOSITORY / "var" / "lab" / "checkpoints", lab.python)
    drafter = str(found.eagle3) if method == "eagle3" else ""
    variables = {"RANKSCOPE_ENABLED": "0"}
    if enabled:
        variables = {
            "RANKSCOPE_ENABLED": "1",
            "RANKSCOPE_FLIGHT_DIR": str(work / "flight"),
            "RANKSCOPE_RING_STEPS": str(RING_STEPS),
            "RANKSCOPE_LAB_TRACE": str(work / "trace"),
        }
    return Options(
        lab,
        replace(settings, target=str(found.target), method=method, drafter=drafter),
        extra={**variables, **extra},
    )


def run_once(work: Path, method: str, *, settings: Settings, enabled: bool = True, **extra: str) -> V2Run:
    """
    Run to the end. Further arguments are environment variables.

    Raises:
        RunError: it did not come to its end.

    """
    work.mkdir(parents=True, exist_ok=True)
    with OfflineRun(options(work, method, settings=settings, enabled=enabled, **extra), work / "vllm.log") as run:
        facts = run.facts()
    return V2Run(facts, read_ranks(work / "flight"), trace.read(work / "trace"))
