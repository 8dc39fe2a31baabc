"""
Other plugins that wrap the same functions, in every order of patching and unpatching; and runners that refuse to be hooked.

In every state of every order a step reaches vLLM's functions once each, theirs run, ours record, and in the end what
was there is there again.
"""

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from inspect import isfunction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt
from loading import load_module

import rankscope_exporter
from rankscope_exporter import plugin
from rankscope_exporter.contract import HookState
from rankscope_exporter.flight import FlightFile, list_flight_files
from rankscope_exporter.hooks import targets
from rankscope_exporter.hooks.install import Installation, install
from rankscope_exporter.recorder.base import SAMPLE_STEPS
from rankscope_exporter.settings import WorkerSettings

SUPPORT = Path(__file__).parents[1] / "support"
ORDERS = [
    "".join(order)
    for order in itertools.permutations("PUIX")
    if order.index("P") < order.index("U") and order.index("I") < order.index("X")
]
"""
They Patch and Unpatch, we Install and uninstall (X).
"""


@pytest.fixture(params=["standin", "standin_v2"])
def standin(request: pytest.FixtureRequest) -> ModuleType:
    """
    A fresh copy of a stand-in for each test, as its classes and functions are patched: V1 and V2.
    """
    name = f"{request.param}_orders"
    return load_module(SUPPORT / f"{request.param}.py", name)


class Host:
    """
    A runner, how it takes a step, and how often vLLM's own functions are reached.
    """

    def __init__(self, module: ModuleType, make: Callable[[], Any] | None = None) -> None:
        self.module = module
        self.reached: Counter[str] = Counter()
        self.v2 = hasattr(module, "Scheduler")
        for cls in (module.StandInRunner, *([module.PPHandler] if self.v2 else [])):
            functions = [name for base in cls.__mro__ for name, value in vars(base).items() if isfunction(value)]
            for name in functions:
                if not name.startswith("__"):
                    setattr(cls, name, self._count(getattr(cls, name)))
        if self.v2:
            module.compute_need_sampled_mask = self._count(module.compute_need_sampled_mask)
            self.scheduler = module.Scheduler(size=1)
            self.scheduler.add("a", 4, 1 << 18)
        self.runner = make() if make else module.StandInRunner()

    def _count(self, function: Any) -> Any:
        if hasattr(function, "counted"):
            return function

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.reached[function.__name__] += 1
            return function(*args, **kwargs)

        counted.counted = True
        return counted

    def step(self) -> Counter[str]:
        """How often each of vLLM's functions was reached in one step."""
        self.reached.clear()
        if self.v2:
            self.module.take_step(self.runner, self.scheduler.schedule())
        else:
            self.module.take_step(self.runner, self.module.schedule(self.runner))
        return Counter(self.reached)

    def install(self, directory: Path, **settings: Any) -> Installation:
        identity = self.module.identity_of(self.runner) if self.v2 else self.module.identity()
        return install(self.runner, identity, WorkerSettings(flight_dir=directory, ring_steps=64, **settings))

    def hooked(self) -> dict[str, tuple[Any, str]]:
        """Owner and attribute of each function that we hook."""
        found = {p.name: targets.find(self.runner, p) for p in targets.points_of(self.runner)}
        return {name: (place.owner_object, place.attribute_name) for name, place in found.items() if place}

    def state(self) -> dict[str, tuple[Any, Any]]:
        """What lies in each owner itself, and what in its class."""
        return {
            name: (
                vars(owner).get(attribute),
                None if isinstance(owner, ModuleType) else getattr(type(owner), attribute),
            )
            for name, (owner, attribute) in self.hooked().items()
        }


class Theirs:
    """
    Another plugin: wraps what we wrap, on the instance or the class, and puts back what it found.
    """

    def __init__(self, host: Host, kind: str, place: str) -> None:
        self.calls: Counter[str] = Counter()
        self._host, self._kind, self._place = host, kind, place
        self._saved: list[tuple[Any, str, Any]] = []

    def patch(self) -> None:
        for hook, (owner, attribute) in self._host.hooked().items():
            place = type(owner) if self._place == "class" and not isinstance(owner, ModuleType) else owner
            self._saved.append((place, attribute, vars(place).get(attribute)))
            setattr(place, attribute, self._wrap(hook, getattr(place, attribute)))

    def unpatch(self) -> None:
        for place, attribute, saved in self._saved:
            if saved is None:
                delattr(place, attribute)
            else:
                setattr(place, attribute, saved)

    def _wrap(self, hook: str, original: Any) -> Any:
        if self._kind == "wrapt":

            def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
                self.calls[hook] += 1
                return wrapped(*args, **kwargs)

            return wrapt.FunctionWrapper(original, wrapper)

        def theirs(*args: Any, **kwargs: Any) -> Any:
            self.calls[hook] += 1
            return original(*args, **kwargs)

        return functools.wraps(original)(theirs) if self._kind == "wraps" else theirs


class Watch:
    """
    Which of our functions ran.
    """

    def __enter__(self) -> set[str]:
        self.ran: set[str] = set()
        ours = str(Path(rankscope_exporter.__file__).parent)

        def note(frame: Any, event: str, argument: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(ours):
                self.ran.add(f"{Path(code.co_filename).stem}.{code.co_name}")

        sys.setprofile(note)
        return self.ran

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("place", ["class", "instance"])
@pytest.mark.parametrize("kind", ["wraps", "wrapt", "plain"])
def test_every_order_of_patching(standin, tmp_path, order, place, kind):
    """VLLM's functions are reached once a step in every state, theirs while they are on, ours while they are on."""
    host = Host(standin)
    usual, before = host.step(), host.state()
    theirs = Theirs(host, kind, place)
    installation: Any = None
    for done, operation in enumerate(order, 1):
        if operation == "P":
            theirs.patch()
        elif operation == "U":
            theirs.unpatch()
        elif operation == "I":
            installation = host.install(tmp_path)
        else:
            installation.uninstall()
        # What is patched in a class that we have hooked comes into force when we look around.
        for _ in range(SAMPLE_STEPS + 1):
            assert host.step() == usual
        theirs.calls.clear()
        with Watch() as ran:
            assert host.step() == usual
        patched, installed = ({first, last} & set(order[:done]) == {first} for first, last in ("PU", "IX"))
        assert (theirs.calls["execute_model"], theirs.calls["sample_tokens"]) == (patched, patched)
        if not patched:
            assert not any(theirs.calls.values())
        cleared = place == "instance" and order[:done] == "PIU"
        if not installed or cleared:
            # A wrapper that they hold passes calls on, and does nothing else; one that they put away with theirs is gone.
            assert {name.partition(".")[0] for name in ran} <= {"wrappers"}
        elif kind == "plain" and order.startswith("PI"):
            assert installation.hooks["execute_model"].state == HookState.OFF
        else:
            assert installation.hooks["execute_model"].state == HookState.ON
            assert {"base.begin", "base.end"} <= ran
    after = host.state()
    for hook, (owner, _) in host.hooked().items():
        in_class = place == "class" and not isinstance(owner, ModuleType)
        # With IPXU they put back the wrapper of ours that they had found; it does nothing.
        if in_class or order != "IPXU":
            assert after[hook] == before[hook]
    with FlightFile(installation.flight.path) as flight:
        assert flight.faults() == 0


@pytest.mark.parametrize("place", ["class", "instance"])
def test_a_wrapper_that_hides_its_parameters_is_left_alone(standin, tmp_path, place):
    """A function that takes anything cannot be told from another: the hook is off and says so, vLLM and theirs run."""
    host = Host(standin)
    usual = host.step()
    theirs = Theirs(host, "plain", place)
    theirs.patch()
    installation = host.install(tmp_path)
    report = installation.hooks["execute_model"]
    assert report.state == HookState.OFF
    assert "(args, kwargs)" in report.reason
    assert all(r.state != HookState.ON or r.hook == "discard_request_mask" for r in installation.hooks.values())
    assert host.step() == usual
    assert theirs.calls["execute_model"] == 1


def test_a_class_patched_after_us_comes_into_force(standin, tmp_path):
    """Our wrapper on the instance does not hide for long what others do to the class, also if they made it from ours."""
    host = Host(standin)
    usual = host.step()
    installation = host.install(tmp_path)
    ours = host.runner.execute_model
    calls = []

    def theirs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(scheduler_output, *args, **kwargs)

    type(host.runner).execute_model = theirs
    for _ in range(SAMPLE_STEPS):
        assert host.step() == usual
    calls.clear()
    assert host.step() == usual
    assert calls == [1]
    assert installation.hooks["execute_model"].state == HookState.ON
    assert installation.recorder.step == SAMPLE_STEPS + 1


def test_a_hook_that_others_took_off_is_reported(standin, tmp_path):
    """Whoever clears the instance's attributes ends what we see: the report says so instead of showing a hook that is on."""
    host = Host(standin)
    installation = host.install(tmp_path)
    del host.runner.sample_tokens
    for _ in range(SAMPLE_STEPS):
        host.step()
    report = installation.hooks["sample_tokens"]
    assert report.state == HookState.REMOVED
    assert "took it off" in report.reason
    with FlightFile(installation.flight.path) as flight:
        assert {h["hook"]: h["state"] for h in flight.report()["hooks"]}["sample_tokens"] == "removed"


def test_two_ranks_in_one_process_come_off_in_any_order(standin, tmp_path):
    """Ranks that share a module each hook its functions; whoever goes first, in the end what was there is there again."""
    for first_off in (0, 1):
        host = Host(standin)
        other = host.module.StandInRunner()
        before = host.state()
        installations = [host.install(tmp_path / f"{first_off}a")]
        host.runner, kept = other, host.runner
        installations.append(host.install(tmp_path / f"{first_off}b"))
        installations[first_off].uninstall()
        installations[1 - first_off].uninstall()
        assert host.state() == before
        host.runner = kept
        assert host.state() == before


def test_others_see_what_is_under_a_wrapper(standin, tmp_path):
    """Name, text and signature of a hooked method are those of vLLM's."""
    import inspect

    host = Host(standin)
    signatures = {n: inspect.signature(getattr(o, a)) for n, (o, a) in host.hooked().items()}
    host.install(tmp_path)
    for name, (owner, attribute) in host.hooked().items():
        assert inspect.signature(getattr(owner, attribute)) == signatures[name]
        assert getattr(owner, attribute).__name__ == attribute


def test_a_subclass_that_extends_a_method_is_hooked_once(standin, tmp_path):
    """A runner that calls its base class's method is one step, not two."""

    class Extended(standin.StandInRunner):
        def execute_model(self, scheduler_output, *args, **kwargs):
            return super().execute_model(scheduler_output, *args, **kwargs)

    host = Host(standin, Extended)
    usual = host.step()
    installation = host.install(tmp_path)
    assert host.step() == usual
    assert installation.recorder.step == 1
    installation.uninstall()
    assert "execute_model" not in vars(host.runner)


def refuse(standin: ModuleType, how: str) -> type:
    """A class of runners that cannot be hooked."""
    cls = standin.StandInRunner
    if how == "slots":
        names = vars(cls())
        methods = {name: value for name, value in vars(cls).items() if name not in {"__dict__", "__weakref__"}}
        return type("Slotted", (), {**methods, "__slots__": tuple(names)})

    def refusing(self: Any, name: str, value: Any) -> None:
        if not hasattr(cls, name):
            object.__setattr__(self, name, value)
        elif how == "raises":
            msg = f"{name} is final"
            raise TypeError(msg)

    return type("Refusing", (cls,), {"__setattr__": refusing})


@pytest.mark.parametrize("how", ["slots", "raises", "ignores"])
def test_a_runner_that_refuses_attributes(standin, tmp_path, caplog, how):
    """It runs as ever; each hook of it is off with a reason, and the log says so."""

    def make() -> Any:
        return refuse(standin, how)()  # with what the host has put into the class by then

    host = Host(standin, make)
    host.step()
    plain = host.step()
    installation = host.install(tmp_path)
    reports = {report.hook: report for report in installation.hooks.values()}
    assert reports["execute_model"].state == HookState.OFF
    assert "could not be put on" in reports["execute_model"].reason
    assert not any(r.state == HookState.ON for name, r in reports.items() if name != "discard_request_mask")
    assert host.step() == plain
    assert "execute_model could not be put on" in caplog.text
    with FlightFile(installation.flight.path) as flight:
        assert {h["hook"]: h["state"] for h in flight.report()["hooks"]}["execute_model"] == "off"
        assert flight.step() == 0
    installation.uninstall()
    assert host.step() == plain


@pytest.mark.parametrize("standin", ["standin_v2"], indirect=True)
def test_a_handler_that_refuses_attributes(standin, tmp_path):
    """Hooks of other objects go on: steps and lengths are recorded, the exchange is off."""

    class Slotted(standin.PPHandler):
        def __setattr__(self, name, value):
            if callable(value):
                raise TypeError(name)
            super().__setattr__(name, value)

    host = Host(standin, lambda: standin.StandInRunner(handler=Slotted))
    usual = host.step()
    installation = host.install(tmp_path)
    assert host.step() == usual
    states = {name: report.state for name, report in installation.hooks.items()}
    assert (states["execute_model"], states["update_requests"]) == (HookState.ON, HookState.ON)
    assert (states["PPHandler.receive"], states["PPHandler.broadcast"]) == (HookState.OFF, HookState.OFF)
    installation.uninstall()
    assert host.step() == usual


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """
    VLLM's worker wrapper and what else the plugin asks vLLM and torch for, as stubs.
    """

    class WorkerWrapperBase:
        vllm_config = SimpleNamespace(
            instance_id="e1", parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0)
        )

        def init_device(self):
            self.devices = getattr(self, "devices", 0) + 1
            return "device"

    group = SimpleNamespace(rank_in_group=0, world_size=1, device_group=None)
    stubs = {
        "vllm.v1.worker.worker_base": {"WorkerWrapperBase": WorkerWrapperBase},
        "vllm.distributed.parallel_state": {"get_pp_group": lambda: group, "get_tp_group": lambda: group},
        "torch.distributed": {"get_backend": lambda group: "gloo"},
    }
    for name, content in stubs.items():
        for parent in ["vllm", "vllm.v1", "vllm.v1.worker", "vllm.distributed", "torch"]:
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], leaf, module, raising=False)
    monkeypatch.setenv("RANKSCOPE_FLIGHT_DIR", str(tmp_path))
    monkeypatch.delenv("RANKSCOPE_ENABLED", raising=False)
    return WorkerWrapperBase


def their_init_device(cls: type, kind: str) -> None:
    """Another plugin wraps `init_device`."""
    original = cls.init_device
    if kind == "wrapt":
        cls.init_device = wrapt.FunctionWrapper(
            original, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)
        )
        return

    def init_device(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    cls.init_device = functools.wraps(original)(init_device) if kind == "wraps" else init_device


@pytest.mark.parametrize("kind", ["wraps", "wrapt", "plain"])
@pytest.mark.parametrize("order", sorted(set(itertools.permutations("RRT"))))
def test_register_and_another_plugin_in_any_order(standin, worker, tmp_path, kind, order):
    """However often we register, before or after them: one device, one flight file, each hook once."""
    for who in order:
        if who == "R":
            plugin.register()
        else:
            their_init_device(worker, kind)
    host = Host(standin)
    usual = host.step()
    wrapper = worker()
    wrapper.worker = SimpleNamespace(model_runner=host.runner)
    assert wrapper.init_device() == "device"
    assert wrapper.devices == 1
    assert len(list(list_flight_files(tmp_path))) == 1
    assert host.step() == usual
    installation = host.runner._rankscope
    assert installation.recorder.step == 1
    installation.uninstall()
    assert host.step() == usual
    assert [name for name in vars(host.runner) if callable(vars(host.runner)[name])] == []


def test_a_runner_that_refuses_our_mark_is_hooked_all_the_same(standin, worker, tmp_path, caplog):
    """The mark on the runner is for others to find; without it nothing is missed, and no warning says so."""

    class Strict(standin.StandInRunner):
        def __setattr__(self, name, value):
            if name == "_rankscope":
                raise AttributeError(name)
            super().__setattr__(name, value)

    plugin.register()
    host = Host(standin, Strict)
    wrapper = worker()
    wrapper.worker = SimpleNamespace(model_runner=host.runner)
    wrapper.init_device()
    host.step()
    (path,) = list_flight_files(tmp_path)
    with FlightFile(path) as flight:
        assert flight.step() == 1
    assert "blind" not in caplog.text
