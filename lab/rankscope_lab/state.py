"""
What a running lab leaves on disk for `status` and `down`, and for whoever watches it.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankscope_lab.processes import alive


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """
    One deployment of a running lab.
    """

    name: str
    state: str
    """In words: `starting`, `serving`, `wedged`, `ended`."""
    engine_url: str
    exporter_url: str | None
    flight_dir: str
    log: str
    run_ids: list[str]
    """Marks of its processes."""
    requests: int = 0
    completed: int = 0
    timed_out: int = 0
    tokens: int = 0
    wrong_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LabState:
    """
    A running lab, or what a crashed one left.
    """

    pid: int
    started: int
    """When that process started, in clock ticks since boot: a pid alone may be somebody else's by now."""
    phase: str
    deployments: list[DeploymentState]
    server_url: str | None = None
    server_run_ids: tuple[str, ...] = ()

    def run_ids(self) -> list[str]:
        """
        Marks of all its processes.
        """
        return [*self.server_run_ids, *(run_id for deployment in self.deployments for run_id in deployment.run_ids)]

    def running(self) -> bool:
        """
        Whether its supervisor is there.
        """
        return alive(self.pid, self.started)


def path_in(directory: Path) -> Path:
    """
    Where the state lies.
    """
    return directory / "run.json"


def write(directory: Path, state: LabState) -> None:
    """
    Write the state; readers see the old one or the new one.
    """
    draft = directory / f".run.{os.getpid()}"
    draft.write_text(json.dumps(asdict(state), indent=2))
    draft.replace(path_in(directory))


def read(directory: Path) -> LabState | None:
    """
    The state in `directory`; None if there is none, or one that another version wrote.
    """
    try:
        raw: dict[str, Any] = json.loads(path_in(directory).read_text())
        return LabState(**{**raw, "deployments": [DeploymentState(**entry) for entry in raw["deployments"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None
