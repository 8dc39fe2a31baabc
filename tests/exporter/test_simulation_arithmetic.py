"""
The simulated ranks, with the real hooks on them, go wrong as vLLM's do, and the trim fix rights them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from rankscope_exporter.contract.words import ControlOutcome, Guard, HookState, Mitigation, MitigationState
from rankscope_exporter.flight import FlightFile
from rankscope_exporter.flight.layout import encode_control
from rankscope_exporter.hooks.install import Installation, install
from rankscope_exporter.mitigations.trim import TrimFix
from rankscope_exporter.simulation.rank import rank_identity, worker_settings
from rankscope_exporter.simulation.runner import ModelRunner, Tokens
from rankscope_exporter.simulation.scheduler import Scheduler, SchedulerOutput
from rankscope_exporter.simulation.spec import EngineSpec, Workload
from rankscope_exporter.simulation.traffic import Arrival, Traffic


class WedgedError(Exception):
    """A rank waits for a collective that the other one does not take part in."""


@dataclass
class DirectGroup:
    """Two ranks that take turns in one thread: what the last one sends lies here until the first one comes for it."""

    is_last_rank: bool
    sent: deque[Tokens]

    def broadcast(self, tokens: Tokens) -> None:
        self.sent.append(tokens)

    def receive(self, shape: tuple[int, int]) -> Tokens:
        if not self.sent:
            raise WedgedError
        tokens = self.sent.popleft()
        assert tokens.shape == shape
        return tokens


@dataclass
class Pair:
    """An engine of two ranks in this process, with the hooks of two processes."""

    spec: EngineSpec
    runners: list[ModelRunner] = field(default_factory=list)
    installations: list[Installation] = field(default_factory=list)
    sent: deque[Tokens] = field(default_factory=deque)
    in_flight: deque[tuple[SchedulerOutput, dict[str, int]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        workload = self.spec.workload
        self.scheduler = Scheduler(workload.slots, workload.draft_tokens)
        self.traffic = Traffic(workload)
        for rank in range(2):
            runner = ModelRunner(
                DirectGroup(rank == 1, self.sent),
                slots=workload.slots,
                draft_tokens=workload.draft_tokens,
                accept=workload.accept,
            )
            identity = rank_identity(self.spec, "pair", rank, runner)
            self.installations.append(install(runner, identity, worker_settings(self.spec), completes=True))
            self.runners.append(runner)

    def tick(self, arrivals: list[Arrival] | None = None) -> None:
        """One turn of the engine; the scheduler hears of a step after it has planned the next."""
        self.scheduler.add(self.traffic.tick() if arrivals is None else arrivals)
        plan = self.scheduler.schedule()
        if plan is not None:
            self.in_flight.append((plan, self.step(plan)))
        if len(self.in_flight) > 1 or (plan is None and self.in_flight):
            self.scheduler.update(*self.in_flight.popleft())

    def step(self, plan: SchedulerOutput) -> dict[str, int]:
        first, last = self.runners
        for runner in self.runners:
            runner.execute_model(plan)
        if not plan.total_num_scheduled_tokens:
            return {}
        generated = last.sample_tokens(None)
        first.sample_tokens(None)
        if self.sent:
            raise WedgedError
        return dict(generated)

    def run_until_wedged(self, ticks: int) -> bool:
        try:
            for _ in range(ticks):
                self.tick()
        except WedgedError:
            return True
        return False

    def paths(self) -> list[Path]:
        return [i.flight.path for i in self.installations if i.flight is not None]

    def records(self) -> list[npt.NDArray[np.void]]:
        found = []
        for path in self.paths():
            with FlightFile(path) as file:
                assert file.faults() == 0
                found.append(file.records())
        return found

    def request_fix(self, generation: int, *, desired: bool, effective_step: int) -> None:
        word = encode_control(Mitigation.TRIM, generation, effective_step, desired=desired)
        for path in self.paths():
            with FlightFile(path, writable=True) as file:
                file.request_control(word)


@pytest.fixture
def make_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(*, fix: bool = False, **workload: float) -> Pair:
        spec = EngineSpec("pair", tmp_path / str(len(pairs)), replace(Workload(), **workload), fix=fix, paced=False)  # type: ignore[arg-type]
        pairs.append(Pair(spec))
        return pairs[-1]

    yield make
    for pair in pairs:
        for installation in pair.installations:
            installation.uninstall()  # both ranks share one function here: the fix must not outlive the test


def first_step(records: npt.NDArray[np.void], which: npt.NDArray[np.bool_]) -> int:
    """The first step of those that `which` picks; a number beyond all steps if there is none."""
    return int(records["step"][which][0]) if which.any() else 1 << 60


def test_fix_fits_the_simulated_code() -> None:
    """The simulated `_update_states` has the shape that the trim fix looks for."""
    fix = TrimFix(ModelRunner._update_states)
    assert (fix.state, fix.reason) == (MitigationState.AVAILABLE, "")


def test_every_hook_is_on(make_pair: Callable[..., Pair]) -> None:
    """No hook is missing on a simulated runner, the mask included."""
    for installation in make_pair().installations:
        assert {hook: report.state for hook, report in installation.hooks.items()} == dict.fromkeys(
            installation.hooks, HookState.ON
        )
        assert "discard_request_mask" in installation.hooks


@pytest.mark.parametrize("seed", range(4))
def test_ranks_part_in_order(make_pair: Callable[..., Pair], seed: int) -> None:
    """Drift comes first, on the first rank only; then masks differ, then guards, and at that step the engine wedges."""
    pair = make_pair(seed=seed, hold_seconds=1.0)
    assert pair.run_until_wedged(400)
    first, last = pair.records()
    assert len(first) == len(last)
    drift = first_step(first, first["drift_max"] > 0)
    decided = (first["guard"] != Guard.NONE) & (last["guard"] != Guard.NONE)
    masks = first_step(first, decided & (first["mask_hash"] != last["mask_hash"]))
    guards = first_step(first, decided & (first["guard"] != last["guard"]))
    assert drift < masks < guards == first["step"][-1]
    assert (first["guard"][-1], last["guard"][-1]) == (Guard.SKIP, Guard.BROADCAST)
    assert last["drift_max"].max() == 0
    assert (first["batch_hash"] == last["batch_hash"]).all()


@pytest.mark.parametrize("accept", [0.3, 0.7, 0.9])
def test_steady_arrivals_hold_an_engine_open(make_pair: Callable[..., Pair], accept: float) -> None:
    """As long as traffic is busy the guards agree although the ranks drift; the lull wedges the engine."""
    pair = make_pair(accept=accept, hold_seconds=30.0, lull_seconds=60.0)
    assert not pair.run_until_wedged(600)
    assert pair.records()[0]["drift_max"].max() > 3
    assert pair.run_until_wedged(1200)


def test_fix_from_the_start_keeps_ranks_together(make_pair: Callable[..., Pair]) -> None:
    """With the fix on from the start nothing drifts, masks and guards are equal, and requests complete."""
    pair = make_pair(fix=True, hold_seconds=5.0)
    assert not pair.run_until_wedged(900)
    first, last = pair.records()
    assert first["drift_max"].max() == last["drift_max"].max() == 0
    assert (first["mask_hash"] == last["mask_hash"]).all()
    assert (first["guard"] == last["guard"]).all()
    assert first["trimmed_total"][-1] > 0
    assert set(first["mitigation"]) == set(last["mitigation"]) == {MitigationState.APPLIED}
    assert pair.scheduler.completed > 50


def test_fix_turned_on_while_ranks_drift(make_pair: Callable[..., Pair]) -> None:
    """Turned on by the control word, the fix acts at the same step on both ranks, and nothing drifts from that step on."""
    pair = make_pair(hold_seconds=60.0)
    assert not pair.run_until_wedged(60)
    assert pair.records()[0]["drift_max"][-1] > 0
    pair.request_fix(1, desired=True, effective_step=70)
    assert not pair.run_until_wedged(120)
    for path in pair.paths():
        with FlightFile(path) as file:
            control, records = file.control(), file.records()
        assert (control.acted_step, control.outcome) == (70, ControlOutcome.APPLIED)
        assert records["drift_max"][records["step"] >= 70].max() == 0
    assert pair.records()[0]["drift_max"][68] > 0


def test_fix_turned_off_again(make_pair: Callable[..., Pair]) -> None:
    """Off again, the first rank drifts again."""
    pair = make_pair(fix=True, hold_seconds=60.0)
    assert not pair.run_until_wedged(40)
    pair.request_fix(1, desired=False, effective_step=50)
    assert not pair.run_until_wedged(40)
    first, last = pair.records()
    assert first["drift_max"][first["step"] < 50].max() == 0
    assert first["drift_max"][first["step"] >= 50].max() > 0
    assert last["drift_max"].max() == 0


def test_lone_chunk_of_a_prompt_is_skipped_by_both(make_pair: Callable[..., Pair]) -> None:
    """A prompt that takes several steps is masked on both ranks, and alone in its batch both skip the collective."""
    pair = make_pair()
    pair.tick([Arrival("long", 1300, 20, 1)])
    for _ in range(4):
        pair.tick([])
    first, last = pair.records()
    assert first["guard"].tolist()[:4] == [Guard.SKIP, Guard.SKIP, Guard.BROADCAST, Guard.BROADCAST]
    assert (first["guard"] == last["guard"]).all()
    assert (first["mask_hash"] == last["mask_hash"]).all()


def test_everything_accepted_never_drifts(make_pair: Callable[..., Pair]) -> None:
    """Drafts that are always right leave nothing to trim."""
    pair = make_pair(accept=1.0, hold_seconds=5.0)
    assert not pair.run_until_wedged(600)
    assert pair.records()[0]["drift_max"].max() == 0


def test_without_speculation_nothing_drifts(make_pair: Callable[..., Pair]) -> None:
    """Without drafts the ranks agree, fix or not."""
    pair = make_pair(draft_tokens=0, hold_seconds=5.0)
    assert not pair.run_until_wedged(600)
    first, last = pair.records()
    assert first["drift_max"].max() == 0
    assert (first["guard"] == last["guard"]).all()
