"""
What a recorder is told once, at installation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankscope_exporter.recorder.budget import Budget
from rankscope_exporter.recorder.request_ids import Name


@dataclass(frozen=True, slots=True)
class RecorderOptions:
    """
    How to record, and whom to tell.
    """

    completes: bool
    """Whether a collective call of this rank returns only once the collective is complete, as with gloo."""
    last_rank: bool
    """Whether this is the last pipeline rank: it samples, and trims by itself."""
    name: Name
    """How a request id is written into the flight file."""
    budget: Budget
    failed: Callable[[int, int, str, BaseException], Any]
    """Told (step, phase, method, error) when an error of vLLM ended a step."""
    look_around: Callable[[], Any] = lambda: None
    """Called every few steps: whether others have changed what lies under a hook."""
