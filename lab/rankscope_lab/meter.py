"""
vLLM plugin: what Rankscope's hooks cost a real step, by taking them off and putting them on again every few steps.

Active only with `RANKSCOPE_LAB_METER=DIRECTORY`. Each rank writes `pp<rank>.json` there: processor time of the step's
thread with hooks on and off, block by block, and the wall-clock time of a step. Blocks alternate within one process,
so what the machine does beside it falls on both alike.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

BLOCK_STEPS = 16
WRITE_BLOCKS = 20
MAX_BLOCKS = 4000

_MARK = "_rankscope_meter"


def register() -> None:
    """
    Entry point `vllm.general_plugins`.
    """
    directory = os.environ.get("RANKSCOPE_LAB_METER")
    if not directory:
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.execute_model
    if hasattr(original, _MARK):
        return

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self.worker.model_runner
        if not hasattr(runner, _MARK):
            setattr(runner, _MARK, Meter(runner, Path(directory)))
        return original(self, *args, **kwargs)

    setattr(execute_model, _MARK, True)
    WorkerWrapperBase.execute_model = execute_model


class Meter:
    """
    Times the steps of one runner and flips its hooks.
    """

    def __init__(self, runner: Any, directory: Path) -> None:
        installation = runner._rankscope
        self._runner = runner
        self._path = directory / f"pp{installation.identity.pp_rank}.json"
        self._hooks = dict(installation.wrappers)
        self._on = True
        self._steps = 0
        self._cpu_ns = 0
        self._began_ns = 0
        self._block: list[int] = []
        self._blocks: list[tuple[bool, float]] = []
        self._walls: list[int] = []
        self._calls = {"execute_model": self._timed("execute_model"), "sample_tokens": self._timed("sample_tokens")}
        self._put()

    def _put(self) -> None:
        """
        Put the hooks on or take them off, the meter itself around them either way.
        """
        for name, hook in self._hooks.items():
            if self._on:
                setattr(self._runner, name, hook)
            else:
                self._runner.__dict__.pop(name, None)
        self._inner = {name: getattr(self._runner, name) for name in self._calls}
        for name, call in self._calls.items():
            setattr(self._runner, name, call)

    def _timed(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "execute_model":
                self._step()
            before = time.thread_time_ns()
            try:
                return self._inner[name](*args, **kwargs)
            finally:
                self._cpu_ns += time.thread_time_ns() - before

        return call

    def _step(self) -> None:
        now = time.monotonic_ns()
        if self._steps and len(self._blocks) < MAX_BLOCKS:
            self._block.append(self._cpu_ns)
            self._walls.append(now - self._began_ns)
            if len(self._block) == BLOCK_STEPS:
                # The first steps of a block are warm-up of what the flip has changed.
                self._blocks.append((self._on, statistics.median(self._block[2:])))
                self._block = []
                self._on = not self._on
                self._put()
                if len(self._blocks) % WRITE_BLOCKS == 0:
                    self._write()
        self._steps += 1
        self._cpu_ns = 0
        self._began_ns = now

    def _write(self) -> None:
        found = {
            "on_ns": [cpu for on, cpu in self._blocks if on],
            "off_ns": [cpu for on, cpu in self._blocks if not on],
            "step_ns": statistics.median(self._walls),
            "steps": self._steps,
        }
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(found))
        unfinished.replace(self._path)
