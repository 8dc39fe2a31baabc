"""
What a simulated engine is to be like.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Workload:
    """
    Requests and how well they speculate.

    `accept` is the chance that a draft token is accepted, given that those before it were; `draft_tokens` is vLLM's
    number of speculative tokens, k. `arrivals` are requests per second while traffic is busy, None for as many as keep
    the guards together. Traffic is busy for `hold_seconds`, then nearly quiet for `lull_seconds`, and so on.
    """

    accept: float = 0.7
    draft_tokens: int = 3
    arrivals: float | None = None
    hold_seconds: float = 240.0
    lull_seconds: float = 20.0
    slots: int = 64
    steps_per_second: float = 20.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """
    One simulated engine: its deployment, its traffic, and what happens when it wedges.

    `restart_after` is in seconds without a step; None leaves a wedged engine as it is.
    """

    name: str
    flight_dir: Path
    workload: Workload = Workload()
    role: str = "none"
    pp_size: int = 2
    fix: bool = False
    restart_after: float | None = None
    paced: bool = True
    """Whether steps take time; tests want them at once."""
