"""
What the hooks may cost in a step, by a clock of our own: what goes first, and what a busy machine does not trigger.
"""

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import load_module

from rankscope_exporter.contract import Detail, Guard, HookState, Phase
from rankscope_exporter.flight import FlightFile, layout
from rankscope_exporter.hooks.install import Installation, install
from rankscope_exporter.recorder import base, v1, v2
from rankscope_exporter.recorder.budget import WINDOW, Budget, assess_budget
from rankscope_exporter.settings import WorkerSettings

SUPPORT = Path(__file__).parents[1] / "support"
JUDGED = WINDOW * layout.OWN_TIME_STEPS
"""
Steps between two judgements.
"""
BUDGET_US = 50


class Clock:
    """
    Goes on by `tick` nanoseconds with each look at it.
    """

    def __init__(self) -> None:
        self.now, self.tick = 1_000_000, 100

    def __call__(self) -> int:
        self.now += self.tick
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The recorders' clock."""
    made = Clock()
    for module in (base, v1, v2):
        monkeypatch.setattr(module, "_now", made)
    return made


class Rank:
    """
    A runner of either kind with a small budget.
    """

    def __init__(self, kind: str, directory: Path) -> None:
        self.module: ModuleType = load_module(SUPPORT / f"{kind}.py", f"{kind}_budget")
        self.runner = self.module.StandInRunner()
        self.v2 = kind == "standin_v2"
        if self.v2:
            self.scheduler = self.module.Scheduler(size=1)
            self.scheduler.add("a", 4, 1 << 18)
        identity = self.module.identity_of(self.runner) if self.v2 else self.module.identity()
        settings = WorkerSettings(flight_dir=directory, ring_steps=64, budget_microseconds=BUDGET_US)
        self.installation: Installation = install(self.runner, identity, settings)

    def take(self, steps: int, **options: Any) -> None:
        for _ in range(steps):
            output = self.scheduler.schedule() if self.v2 else self.module.schedule(self.runner, **options)
            self.module.take_step(self.runner, output)

    def open(self) -> FlightFile:
        return FlightFile(self.installation.flight.path)

    def states(self) -> dict[str, str]:
        """States of the hooks, as readers see them."""
        with self.open() as flight:
            return {hook["hook"]: hook["state"] for hook in flight.report()["hooks"]}


@pytest.fixture(params=["standin", "standin_v2"])
def rank(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Rank:
    """A rank of either runner."""
    return Rank(request.param, tmp_path)


@pytest.mark.parametrize(
    ("over", "measured", "before", "after"),
    [
        (0, 32, Detail.FULL, Detail.FULL),
        (16, 32, Detail.FULL, Detail.FULL),
        (17, 32, Detail.FULL, Detail.REDUCED),
        (32, 32, Detail.REDUCED, Detail.CUT),
        (16, 32, Detail.REDUCED, Detail.REDUCED),
        (32, 32, Detail.CUT, Detail.CUT),
        (0, 32, Detail.CUT, Detail.CUT),
    ],
)
def test_most_steps_decide(over, measured, before, after):
    """Half of the steps over the budget is not most of them; nothing comes back, and nothing goes after the last notch."""
    assert assess_budget(over, measured, before) is after


def test_detail_goes_first_and_then_the_costliest_hook(rank, clock, caplog):
    """Over the budget: table and histograms off, with a warning; still over: the hook that costs most out, with an error."""
    caplog.set_level(logging.WARNING)
    clock.tick = BUDGET_US * 1000
    rank.take(JUDGED - 1)
    assert caplog.text == ""
    rank.take(1)
    with rank.open() as flight:
        assert flight.detail() is Detail.REDUCED
        assert flight.histograms().samples > 0
        samples = flight.histograms().samples
    assert "request table and histograms are off" in caplog.text
    assert f"{BUDGET_US} microseconds" in caplog.text
    assert set(rank.states().values()) == {"on"}

    rank.take(JUDGED)
    removed = [name for name, state in rank.states().items() if state == "removed"]
    assert len(removed) == 1
    report = rank.installation.hooks[removed[0]]
    assert (report.state, f"{BUDGET_US} microseconds" in report.reason) == (HookState.REMOVED, True)
    assert f"hook {removed[0]} took itself out" in caplog.text
    with rank.open() as flight:
        assert flight.detail() is Detail.CUT
        assert flight.histograms().samples == samples

    rank.take(4 * JUDGED)
    assert [name for name, state in rank.states().items() if state == "removed"] == removed
    assert len([r for r in caplog.records if r.name == "vllm.rankscope"]) == 2


def test_the_hook_that_costs_most_is_the_one_that_goes(rank, clock, monkeypatch):
    """Where reading lengths costs, that hook goes: steps and decisions are still recorded, lengths are unknown, not 0."""

    def slow() -> int:
        clock.now += 100 * BUDGET_US * 1000
        return clock()

    monkeypatch.setattr(v2 if rank.v2 else v1, "_now", slow)
    rank.take(2 * JUDGED)
    update = "update_requests" if rank.v2 else "_update_states"
    assert [name for name, state in rank.states().items() if state == "removed"] == [update]
    rank.take(3)
    with rank.open() as flight:
        record = flight.records()[-1]
    assert (record["step"], record["phase"], record["guard"]) == (2 * JUDGED + 3, Phase.DONE, Guard.BROADCAST)
    assert record["lengths"] == 0


def test_a_machine_that_takes_us_off_the_processor_triggers_nothing(rank, clock, caplog):
    """Single steps that seem to take a second, up to half of them, cost no detail."""
    for measured in range(4 * WINDOW):
        rank.take(layout.OWN_TIME_STEPS - 1)
        clock.tick = 10**9 if measured % 2 else 100
        rank.take(1)
        clock.tick = 100
    with rank.open() as flight:
        assert flight.detail() is Detail.FULL
        assert flight.own_time().seconds > WINDOW
    assert caplog.text == ""


def test_a_step_in_which_we_were_stopped_is_recorded(rank, clock):
    """A process that is stopped in the middle of a hook for longer than the field holds leaves a whole record."""
    rank.take(layout.OWN_TIME_STEPS - 1)
    clock.tick = 10**10
    rank.take(1)
    clock.tick = 100
    with rank.open() as flight:
        record = flight.records()[-1]
        assert flight.faults() == 0
    assert (record["phase"], record["own_ns"]) == (Phase.DONE, (1 << 32) - 1)


def test_with_less_detail_rows_that_stood_in_the_table_are_gone(tmp_path, clock):
    """Requests that drift are still counted when the table is off; what it last held does not stay as if it were true."""
    rank = Rank("standin", tmp_path)
    rank.take(1, lengths=[10, 8, 5])
    with rank.open() as flight:
        assert len(flight.requests()[1]) == 2
    clock.tick = BUDGET_US * 1000
    rank.take(JUDGED, lengths=[10, 8, 5])
    with rank.open() as flight:
        assert flight.detail() is Detail.REDUCED
        assert flight.requests() == (0, [])
        assert flight.records()[-1]["drifting"] == 2
    rank.take(1, lengths=[10, 8, 5])
    with rank.open() as flight:
        assert flight.requests() == (0, [])


def test_a_healthy_rank_keeps_its_detail(rank, clock):
    """Under the budget nothing is ever reduced."""
    rank.take(3 * JUDGED)
    with rank.open() as flight:
        assert flight.detail() is Detail.FULL
        own = flight.own_time()
    assert sum(own.steps) == 3 * WINDOW
    assert own.seconds < 3 * WINDOW * BUDGET_US / 1e6


@given(st.lists(st.booleans(), max_size=6 * WINDOW), st.integers(1, 10**9))
@settings(deadline=None)
def test_the_budget_judges_whole_windows(costly, limit):
    """Each window of steps is judged by itself: one notch for each in which most were over, two at the most."""
    told: list[tuple[Detail, str]] = []
    budget = Budget(limit, lambda detail, hook: told.append((detail, hook)))
    for over in costly:
        own = limit + 1 if over else limit
        budget.spend(own, [("a", own), ("b", own // 2), ("c", 0)])
    windows = [costly[n : n + WINDOW] for n in range(0, len(costly) - WINDOW + 1, WINDOW)]
    bad = sum(sum(window) > WINDOW // 2 for window in windows)
    assert [detail for detail, _ in told] == [Detail.REDUCED, Detail.CUT][:bad]
    assert {hook for _, hook in told} <= {"a"}
