"""
Real vLLM for tests: the lab's interpreter, its checkpoints, and engines that end with the test.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REQUIRE = ("RANKSCOPE_REQUIRE_VLLM", "RANKSCOPE_REQUIRE_ALL")
"""
With one of these set to 1, a missing environment is a failure: where real vLLM has to be tested, nothing is skipped in silence.
"""


@pytest.fixture(scope="session")
def lab_python() -> Path:
    """The interpreter that has vLLM, Rankscope's exporter and the lab."""
    return python_of("default", "lab-setup")


@pytest.fixture(scope="session")
def lab_v2_python() -> Path:
    """The interpreter that has the vLLM whose V2 runner is tested."""
    return python_of("default_v2", "lab-v2-setup")


def python_of(which: str, target: str) -> Path:
    """The interpreter of one of the lab's environments, if it is whole; `target` of the Makefile makes it so."""
    environment = pytest.importorskip(
        "rankscope_lab.environment", reason="the lab is not installed here: run `make setup`"
    )
    found = getattr(environment, which)(os.environ)
    if not found.ready():
        message = f"no lab environment in {found.directory}, or an old one: run `make {target}`"
        if any(os.environ.get(name) == "1" for name in REQUIRE):
            pytest.fail(message)
        pytest.skip(message)
    python: Path = found.python
    return python


@pytest.fixture(scope="session")
def lab_checkpoints(lab_python: Path) -> Any:
    """The target that counts, and its drafter."""
    from rankscope_lab import checkpoint, environment

    return checkpoint.ensure(environment.REPOSITORY / "var" / "lab" / "checkpoints", lab_python)


@pytest.fixture(scope="session")
def start_lab_engine(
    lab_python: Path, lab_checkpoints: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """A context manager for fixtures of a module: takes the fields of `EngineOptions`, gives an engine that is ready, ends it."""
    from rankscope_lab import engine

    @contextlib.contextmanager
    def start(**options: Any) -> Iterator[Any]:
        log = tmp_path_factory.mktemp("engine") / "vllm.log"
        with engine.Engine(
            engine.EngineOptions(python=lab_python, checkpoints=lab_checkpoints, **options), log
        ) as started:
            started.wait_ready()
            yield started

    return start


@pytest.fixture
def lab_engine(start_lab_engine: Callable[..., contextlib.AbstractContextManager[Any]]) -> Iterator[Callable[..., Any]]:
    """Engines that are ready, and end with the test: `lab_engine(slots=8, ...)` takes the fields of `EngineOptions`."""
    with contextlib.ExitStack() as engines:
        yield lambda **options: engines.enter_context(start_lab_engine(**options))
