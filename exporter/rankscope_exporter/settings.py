"""
What the environment tells the exporter inside a vLLM worker.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from rankscope_exporter.contract.words import RequestIds

DEFAULT_FLIGHT_DIR = Path("/dev/shm/rankscope")  # noqa: S108  a shared-memory file system is the point


class WorkerSettings(BaseSettings):
    """
    Settings of the plugin, each from the environment variable `RANKSCOPE_<NAME>`.
    """

    model_config = SettingsConfigDict(env_prefix="RANKSCOPE_", frozen=True, extra="ignore")

    enabled: bool = True
    """Off entirely with `RANKSCOPE_ENABLED=0`."""
    flight_dir: Path = DEFAULT_FLIGHT_DIR
    """Where flight files are made; on a memory file system, so that a store never waits for a disk."""
    trim_fix: Literal["on", "off"] = "off"
    """State of the trim fix at start; `on` is for a fleet that has decided."""
    ring_steps: Annotated[int, Field(ge=64, le=1 << 20)] = 4096
    """Steps that the flight file holds (216 bytes each)."""
    fault_limit: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Errors of ours after which a hook takes itself out."""
    retention_seconds: Annotated[float, Field(ge=0)] = 3600.0
    """How long the file of a process that is gone is kept."""
    request_ids: RequestIds = RequestIds.SHOWN
    """How request ids are recorded: `shown`, `hashed` (the same on all ranks of an engine) or `omitted`."""
    budget_microseconds: Annotated[int, Field(ge=1)] = 2000
    """Own time per step above which less is recorded, if most steps cost that: first no detail, then the costliest hook goes."""
    device_lengths_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between two samples of V2's device-side lengths; 0: none are taken."""
    fault_injection: str = ""
    """For tests: names of hooks that shall fail at each call, separated by commas, or `all`."""
