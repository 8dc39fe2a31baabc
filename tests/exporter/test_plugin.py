"""
The entry point that vLLM calls bare in each of its processes. A stub stands in for vLLM's module.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rankscope_exporter import plugin


@pytest.fixture
def wrapper_class(monkeypatch):
    """
    VLLM's worker wrapper, as far as the plugin looks at it.
    """

    class WorkerWrapperBase:
        def init_device(self):
            self.ready = True
            return "device"

    module = ModuleType("vllm.v1.worker.worker_base")
    module.WorkerWrapperBase = WorkerWrapperBase
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", module)
    monkeypatch.delenv("RANKSCOPE_ENABLED", raising=False)
    return WorkerWrapperBase


def test_registering_twice_patches_once(wrapper_class):
    """VLLM may load plugins several times in a process; the method is wrapped once."""
    plugin.register()
    once = wrapper_class.init_device
    plugin.register()
    assert wrapper_class.init_device is once


def test_the_hooks_come_after_the_device(wrapper_class, monkeypatch):
    """The patched method does what it did, returns what it returned, and only then attaches."""
    seen = []
    monkeypatch.setattr(plugin, "attach", lambda wrapper: seen.append(wrapper.ready))
    plugin.register()
    assert wrapper_class().init_device() == "device"
    assert seen == [True]


@pytest.mark.parametrize("value", ["0", "false", "no", "OFF"])
def test_off_means_untouched(wrapper_class, monkeypatch, value):
    """With RANKSCOPE_ENABLED=0 nothing of vLLM is patched."""
    before = wrapper_class.init_device
    monkeypatch.setenv("RANKSCOPE_ENABLED", value)
    plugin.register()
    assert wrapper_class.init_device is before


def test_a_vllm_that_looks_different_is_no_error(monkeypatch, caplog):
    """register() never raises: a vLLM without that class gives a warning and runs without Rankscope."""
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", ModuleType("vllm.v1.worker.worker_base"))
    plugin.register()
    assert "vLLM runs without it" in caplog.text


def test_a_worker_that_cannot_be_read_is_blind_and_lives(wrapper_class, caplog):
    """Whatever is missing on the worker, attaching gives a warning that says blind, and no error."""
    plugin.register()
    assert wrapper_class().init_device() == "device"
    assert "this rank is blind" in caplog.text


def test_bad_settings_are_a_warning(wrapper_class, monkeypatch, caplog):
    """A setting that makes no sense does not end the worker; the warning names it."""
    monkeypatch.setenv("RANKSCOPE_RING_STEPS", "many")
    plugin.attach(SimpleNamespace())
    assert "RING_STEPS" in caplog.text.upper()
