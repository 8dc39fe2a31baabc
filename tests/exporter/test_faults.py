"""
Errors of ours: swallowed, counted by hook and kind, and after a few of them the hook is out and the others go on.
"""

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import load_module

from rankscope_exporter.contract import HookState
from rankscope_exporter.faults import KIND_LENGTH, KINDS, Faults
from rankscope_exporter.flight import FlightFile, layout
from rankscope_exporter.hooks.install import Installation, install
from rankscope_exporter.hooks.targets import V2_HANDLER_POINTS
from rankscope_exporter.settings import WorkerSettings

SOURCE = Path(__file__).parents[1] / "support" / "standin_v2.py"
LIMIT = 3


def load() -> ModuleType:
    return load_module(SOURCE, "standin_v2_faults")


@pytest.fixture
def standin() -> ModuleType:
    """A fresh copy of the stand-in, as hooks are put on its functions."""
    return load()


def hook(module: ModuleType, runner: Any, directory: Path, broken: str) -> Installation:
    options = {"flight_dir": directory, "ring_steps": 64, "fault_limit": LIMIT, "fault_injection": broken}
    return install(runner, module.identity_of(runner), WorkerSettings(**options), completes=True)


def steps_of(module: ModuleType, count: int) -> list[Any]:
    scheduler = module.Scheduler(drafts=2)
    scheduler.add("a")
    scheduler.add("long", 100)
    return [scheduler.schedule() for _ in range(count)]


def test_errors_are_counted_by_hook_and_kind():
    """Each hook has its own counts, by the class of the error."""
    faults = Faults(100, lambda hook, reason: None)
    for error in (KeyError("a"), KeyError("b"), ValueError()):
        faults.note("one", error)
    faults.note("two", KeyError("c"))
    assert faults.kinds == {"one": {"KeyError": 2, "ValueError": 1}, "two": {"KeyError": 1}}
    assert (faults.total, faults.count("one"), faults.count("two"), faults.count("three")) == (4, 3, 1, 0)


@given(st.lists(st.text("abcdefgh", min_size=1, max_size=300), max_size=60))
@settings(deadline=None)
def test_kinds_are_bounded(names):
    """Whatever classes there are, a few are told apart, the rest is counted together, and no name is long."""
    faults = Faults(1000, lambda hook, reason: None)
    for name in names:
        faults.note("hook", type(f"É{name}", (Exception,), {})())
    kinds = faults.kinds.get("hook", {})
    assert len(kinds) <= KINDS + 1
    assert sum(kinds.values()) == faults.total == len(names)
    assert all(len(kind) <= KIND_LENGTH and kind.isascii() for kind in kinds)


def test_a_hook_is_removed_once_at_its_limit(caplog):
    """At the limit, not before and not again, with a reason that has the count and the class."""
    removed = []
    faults = Faults(LIMIT, lambda hook, reason: removed.append((hook, reason)))
    for number in range(10):
        faults.note("hook", RuntimeError("text of the error"))
        assert len(removed) == (number + 1 >= LIMIT)
    ((name, reason),) = removed
    assert (name, "3 times" in reason, "RuntimeError" in reason) == ("hook", True, True)
    assert "text of the error" not in reason
    assert [r.levelno for r in caplog.records] == [logging.WARNING, logging.ERROR]
    assert "text of the error" in caplog.text


def test_noting_never_raises():
    """Whatever goes wrong in taking a hook out, or in an error's own text, the host hears nothing of it."""

    class Nasty(Exception):
        def __str__(self) -> str:
            raise ValueError

    def fail(hook: str, reason: str) -> None:
        raise OSError

    faults = Faults(1, fail)
    faults.note("hook", Nasty())
    assert faults.total == 1


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("broken", [*(point.name for point in V2_HANDLER_POINTS), "all"])
def test_each_hook_may_fail_for_good(standin, tmp_path, broken, last):
    """The runner does and posts what it did without hooks; the broken hook is out, the others are on and say nothing false."""
    plain, runner = (standin.StandInRunner(last=last, drafts=2) for _ in range(2))
    installation = hook(standin, runner, tmp_path, broken)
    for output in steps_of(standin, 20):
        standin.take_step(plain, output)
        standin.take_step(runner, output)
    assert (runner.log, runner.posted) == (plain.log, plain.posted)
    states = {name: report.state for name, report in installation.hooks.items()}
    reached = installation.faults.kinds
    assert set(reached) <= {broken} or broken == "all"
    for name, state in states.items():
        assert state == (HookState.REMOVED if name in reached else HookState.ON)
    with FlightFile(installation.flight.path) as flight:
        report = {h["hook"]: h for h in flight.report()["hooks"]}
        assert flight.faults() == installation.faults.total == sum(sum(kinds.values()) for kinds in reached.values())
        records = flight.records()
    for name in reached:
        assert report[name]["state"] == "removed"
        assert report[name]["faults"] == {"InjectedFaultError": sum(reached[name].values())}
    if broken not in {"all", "execute_model"}:
        assert records["step"][-1] == 20
    if broken == "compute_need_sampled_mask":
        assert set(records["guard"].tolist()) == {0}


def test_reports_of_faults_are_bounded(standin, tmp_path):
    """Writing the report costs more than a step: it is written at the 1st, 2nd, 4th, ... error, and once when the hook goes."""
    runner = standin.StandInRunner()
    installation = install(
        runner,
        standin.identity_of(runner),
        WorkerSettings(flight_dir=tmp_path, ring_steps=64, fault_limit=100, fault_injection="update_requests"),
    )
    written = []
    installation.publish = lambda: (written.append(1), Installation.publish(installation))
    for output in steps_of(standin, 400):
        standin.take_step(runner, output)
    assert installation.faults.total == 100
    assert len(written) == 8


def test_the_fullest_report_fits(standin, tmp_path):
    """All hooks with the longest reasons and kinds, and a failure: the report is written, so that none is shown as on."""
    runner = standin.StandInRunner(drafts=2)
    installation = hook(standin, runner, tmp_path, "")
    for name in [*installation.hooks, "device_lengths"]:
        for number in range(9):
            installation.faults.note(name, type(f"{'É' * 200}{number}"[::-1], (Exception,), {})("x" * 1000))
        installation.hooks[name] = installation.hooks["execute_model"].model_copy(
            update={"hook": name, "reason": "\N{SNOWMAN}" * 1000}
        )
    installation._failed(1 << 40, 3, "execute_model", type("É" * 500, (Exception,), {})())
    installation.publish()
    with FlightFile(installation.flight.path) as flight:
        report = flight.report()
    assert {h["state"] for h in report["hooks"]} == {"removed"}
    assert len(json.dumps(report)) < layout.HOOKS_BYTES
    assert report["failure"]["step"] == 1 << 40


@given(broken=st.sets(st.sampled_from([point.name for point in V2_HANDLER_POINTS])), last=st.booleans())
@settings(deadline=None, max_examples=25)
def test_any_set_of_broken_hooks_leaves_the_host_alone(tmp_path_factory, broken, last):
    """Whichever hooks fail, in all of their calls: the runner's calls and collectives are those of a runner without hooks."""
    standin = load()
    plain, runner = (standin.StandInRunner(last=last, drafts=2) for _ in range(2))
    installation = hook(standin, runner, tmp_path_factory.mktemp("flight"), ",".join(sorted(broken)))
    for output in steps_of(standin, 8):
        standin.take_step(plain, output)
        standin.take_step(runner, output)
    assert (runner.log, runner.posted) == (plain.log, plain.posted)
    assert set(installation.faults.kinds) <= broken
    assert standin.touched == []
