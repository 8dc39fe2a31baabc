"""
One vLLM API server with two pipeline ranks on this machine's CPU, ended for certain.
"""

import http.client
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rankscope_lab.checkpoint import Checkpoints
from rankscope_lab.processes import Child, free_port

SERVED_MODEL = "counting"
PIPELINE_RANKS = 2
POLL_SECONDS, TELL_SECONDS, HEALTH_SECONDS = 0.25, 5.0, 2.0
GENERATED_TOKENS = "vllm:generation_tokens_total{"
NICENESS = 5
"""
Ranks that compute, or that spin in a wedge, leave room for those who watch them.
"""
START_SECONDS = 300.0
"""
How long a start may take. On a quiet machine it takes 15 to 30 seconds; most of it is importing, three times over.
"""

Progress = Callable[[str], None]
"""
Told in plain words what is going on.
"""


class EngineError(RuntimeError):
    """
    The engine did not become ready; the message has the end of its log.
    """


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """
    What the engine is, and what its drafter does.
    """

    python: Path
    """The lab environment's Python."""
    checkpoints: Checkpoints
    name: str = "engine"
    slots: int = 8
    """Requests in a batch (`--max-num-seqs`)."""
    draft_tokens: int = 3
    speculation: bool = True
    async_scheduling: bool = True
    acceptance: float = 0.9
    pace_ms: float = 0.0
    """Milliseconds that the drafter sleeps in each step."""
    seed: int = 0
    context: int = 2048
    port: int | None = None
    """None: any free one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment, such as `RANKSCOPE_FLIGHT_DIR`."""
    cpus: tuple[int, ...] = ()
    """A processor for each rank; empty: the first ones that this process may use."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the API server; they win over those above."""


def command(options: EngineOptions, port: int) -> list[str]:
    """
    The command line of the API server.
    """
    arguments = [
        *(str(options.python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(options.checkpoints.target), "--served-model-name", SERVED_MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"),
        *("--max-model-len", str(options.context), "--max-num-seqs", str(options.slots)),
        *("--pipeline-parallel-size", str(PIPELINE_RANKS), "--distributed-executor-backend", "mp"),
        "--async-scheduling" if options.async_scheduling else "--no-async-scheduling",
        "--disable-uvicorn-access-log",
    ]
    if options.speculation:
        drafter = {
            "method": "draft_model",
            "model": str(options.checkpoints.drafter),
            "num_speculative_tokens": options.draft_tokens,
        }
        arguments += ["--speculative-config", json.dumps(drafter)]
    return [*arguments, *options.arguments]


def environment(options: EngineOptions, base: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """
    The environment of the API server: `base`, what a CPU needs, the relay's knobs, and the options' own.
    """
    cpus = options.cpus or tuple(sorted(os.sched_getaffinity(0)))[:PIPELINE_RANKS]
    binding = "|".join(str(cpus[rank % len(cpus)]) for rank in range(PIPELINE_RANKS))
    return {
        **base,
        "TMPDIR": str(scratch),  # vLLM leaves its sockets behind when it is killed
        "SPT_NOENV": "1",  # setproctitle must not write over the environment by which we find the processes
        "VLLM_CPU_OMP_THREADS_BIND": binding,  # without it, two ranks refuse a machine with one NUMA node
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # what is imported for the first time is compiled once, not in each process
        "TORCHDYNAMO_DISABLE": "1",  # a step in which a compiler runs for half a minute looks like a wedge
        "RANKSCOPE_LAB": "1",
        "LAB_ACCEPT": str(options.acceptance),
        "LAB_SEED": str(options.seed),
        "LAB_PACE_MS": str(options.pace_ms),
        **options.environment,
    }


class Engine:
    """
    A vLLM engine as a child. Use it in a `with` block, or call `stop`.
    """

    def __init__(self, options: EngineOptions, log: Path) -> None:
        self.options = options
        self.port = options.port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._scratch = Path(tempfile.gettempdir()) / f"rankscope-lab-{uuid.uuid4().hex[:12]}"
        self.child = Child(
            command(options, self.port),
            environment(options, os.environ, self._scratch),
            log,
            niceness=NICENESS,
            remove=[self._scratch],
        )

    def start(self) -> None:
        """
        Start it; `wait_ready` says when it serves.
        """
        self._scratch.mkdir(mode=0o700)
        self.child.start()

    def wait_ready(self, timeout: float = START_SECONDS, progress: Progress | None = None) -> float:
        """
        Wait until it serves; returns the seconds that this took.

        Raises:
            EngineError: it ended instead, or took longer than `timeout` seconds.

        """
        began = told = time.monotonic()
        while not self.healthy():
            waited = time.monotonic() - began
            self.check_starting(waited, timeout)
            if progress and time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                progress(f"{self.options.name}: starting ({waited:.0f} s)")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def check_starting(self, waited: float, timeout: float) -> None:
        """
        Do nothing as long as there is hope that it will be ready.

        Raises:
            EngineError: it has ended, or `waited` is more than `timeout`.

        """
        status = self.child.exit_status()
        if status is None and waited <= timeout:
            return
        what = (
            f"not ready after {timeout:.0f} s" if status is None else f"vLLM ended with status {status} while starting"
        )
        msg = f"{self.options.name}: {what}; the end of {self.child.log}:\n{self.child.log_tail()}"
        raise EngineError(msg)

    def healthy(self) -> bool:
        """
        Whether `/health` answers 200. A wedged engine says yes.
        """
        return self._get("/health") is not None

    def generated_tokens(self) -> float | None:
        """
        Tokens that it has generated since its start, as its own metrics say; None if they cannot be had.
        """
        for line in (self._get("/metrics") or "").splitlines():
            if line.startswith(GENERATED_TOKENS):
                return float(line.rpartition(" ")[2])
        return None

    def _get(self, path: str) -> str | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HEALTH_SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return None
        else:
            return body if response.status == http.HTTPStatus.OK else None
        finally:
            connection.close()

    def pids(self) -> list[int]:
        """
        Ids of the processes of this engine.
        """
        return self.child.pids()

    def stop(self) -> None:
        """
        End it and every process that it started, wedged or not.
        """
        self.child.stop()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
