"""
A vLLM plugin for `bench_lab_calls`: marks each call of the model runner for strace, and flips Rankscope's hooks.

A mark is a look at a path that does not exist, `/rankscope-mark/<begin or end>/<on or off>`: a system call that strace
shows with its text. Hooks are on and off in turn, for some steps each, in one and the same worker.
"""

import os
from typing import Any

BLOCK_STEPS = 8
METHODS = ("execute_model", "sample_tokens")
MARK = "/rankscope-mark"


def register() -> None:
    """
    Entry point `vllm.general_plugins`.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.execute_model
    marked: dict[int, Marks] = {}

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        marks = marked.get(id(self))
        if marks is None:
            marks = marked[id(self)] = Marks(self.worker.model_runner)
        marks.step()
        return original(self, *args, **kwargs)

    WorkerWrapperBase.execute_model = execute_model


class Marks:
    """
    Marks around a runner's methods, outside Rankscope's wrappers.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._hooks = dict(runner._rankscope.wrappers)
        self._steps = 0
        self._marked = {name: self._mark(name) for name in METHODS}
        self._inner: dict[str, Any] = {}
        self._put(on=True)

    def step(self) -> None:
        """
        A step begins.
        """
        if self._steps % BLOCK_STEPS == 0:
            self._put(on=self._steps // BLOCK_STEPS % 2 == 0)
        self._steps += 1

    def _put(self, *, on: bool) -> None:
        for name, hook in self._hooks.items():
            self._runner.__dict__.pop(name, None)
            if on:
                setattr(self._runner, name, hook)
        self._inner = {name: getattr(self._runner, name) for name in METHODS}
        for name, method in self._marked.items():
            setattr(self._runner, name, method)
        self._word = "on" if on else "off"

    def _mark(self, name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            os.access(f"{MARK}/begin/{self._word}", 0)
            try:
                return self._inner[name](*args, **kwargs)
            finally:
                os.access(f"{MARK}/end/{self._word}", 0)

        return method
