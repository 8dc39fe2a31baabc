"""
Starting `rankscope_lab.v2.offline` as a child, with the environment that a CPU needs, and reading what it says in the end.
"""

import json
import os
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rankscope_lab import stand_ins
from rankscope_lab.environment import Environment
from rankscope_lab.processes import Child
from rankscope_lab.v2 import distributions
from rankscope_lab.v2.offline import Settings
from rankscope_lab.v2.plugin import STOCK

POLL_SECONDS = 0.1
RUN_SECONDS = 420.0
"""
How long a run may take. On a quiet machine it takes half a minute to a minute and a half.
"""


class RunError(RuntimeError):
    """
    The run ended without facts, or did not end; the message has the end of its log.
    """


@dataclass(frozen=True, slots=True)
class Options:
    """
    Where a run takes place.
    """

    environment: Environment
    settings: Settings
    v2: bool = True
    """The V2 model runner; else V1."""
    start_method: str = "fork"
    """How vLLM starts its processes: `fork`, which imports vLLM once, or `spawn`, which does so in each."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further environment, such as `RANKSCOPE_FLIGHT_DIR`."""


def variables(options: Options, base: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """
    The environment of a run: `base`, what a CPU needs, what the model runner needs, and the options' own.
    """
    settings = options.settings
    cpus = sorted(os.sched_getaffinity(0))
    ranks = settings.pipeline_ranks * settings.tensor_ranks
    return {
        **base,
        **platform(options.environment.release, v2=options.v2, scratch=scratch),
        stand_ins.START_METHOD: options.start_method,
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks)),
        **options.extra,
    }


def platform(release: str, *, v2: bool, scratch: Path) -> dict[str, str]:
    """
    What stock vLLM needs on a CPU; `scratch` is a directory of the run's own.
    """
    distributions.write(scratch / "path", release)
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    if v2:
        runner = {
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "TRITON_INTERPRET": "1",  # read when a kernel is decorated
            "PYTHONPATH": str(scratch / "path"),
        }
    return {
        "TMPDIR": str(scratch),  # vLLM leaves its sockets behind when it is killed
        "SPT_NOENV": "1",  # setproctitle must not write over the environment by which we find the processes
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # what is imported for the first time is compiled once, not in each process
        "TORCHDYNAMO_DISABLE": "1",  # a step in which a compiler runs for half a minute looks like a wedge
        "RANKSCOPE_LAB": STOCK,
        **runner,
    }


class OfflineRun:
    """
    A run as a child. Use it in a `with` block: it ends there, wedged or not.
    """

    def __init__(self, options: Options, log: Path) -> None:
        self.options = options
        self._scratch = Path(tempfile.gettempdir()) / f"rankscope-lab-{uuid.uuid4().hex[:12]}"
        self._scratch.mkdir(mode=0o700)
        command = (str(options.environment.python), "-m", "rankscope_lab.v2.offline")
        self.child = Child(
            (*command, json.dumps(asdict(options.settings))),
            variables(options, os.environ, self._scratch),
            log,
            remove=[self._scratch],
        )

    def __enter__(self) -> Self:
        self.child.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.stop()

    def facts(self, timeout: float = RUN_SECONDS) -> dict[str, Any]:
        """
        Wait for the end of the run; what it said there.

        Raises:
            RunError: it failed, or took longer than `timeout` seconds.

        """
        deadline = time.monotonic() + timeout
        while self.child.exit_status() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        status = self.child.exit_status()
        found = find_facts(self.child.log.read_text(errors="replace"))
        if status != 0 or found is None:
            what = f"not done after {timeout:.0f} s" if status is None else f"ended with status {status}"
            msg = f"{self.options.settings.method}: {what}; the end of {self.child.log}:\n{self.child.log_tail()}"
            raise RunError(msg)
        return found


def find_facts(log: str) -> dict[str, Any] | None:
    """
    The last line of a log that is a JSON object; None if there is none.
    """
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return None
