"""
What the equivalence tests share: vLLM, imported under the settings that they need, and the trim fix on its loaded function.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rankscope_exporter.mitigations.trim import TrimFix


@pytest.fixture(scope="session")
def harness() -> Iterator[ModuleType]:
    """
    The module `harness.py`. It imports vLLM, which takes a while and warns, so not before a test asks for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("RANKSCOPE_ENABLED", "0")
        pytest.importorskip("vllm", reason="run `make lab-setup`, then .venv-vllm/bin/python -m pytest tests/vllm")
        name = "trim_equivalence_harness"
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("harness.py"))
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="session")
def config(harness: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """
    The engine's configuration.
    """
    return harness.make_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fix(harness: ModuleType) -> Iterator[TrimFix]:
    """
    The trim fix on the loaded `_update_states`, off again when the test ends.
    """
    function = harness.GPUModelRunner._update_states
    original = function.__code__
    yield TrimFix(function)
    function.__code__ = original
