"""
The trim fix by code swap against the same fix in the source, on vLLM's real scheduler and state. `harness.py` has the method.
"""

import ast
import collections
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rankscope_exporter.contract.words import MitigationState
from rankscope_exporter.mitigations.trim import TrimFix

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

ARRIVALS = (0.08, 0.25, 0.5)
"""
Chance of a new request per step: batches of one or two, of a few, and more than the KV cache holds.
"""

SEEDS, STEPS = 12, 430


@dataclass
class Tally:
    """
    What was counted over all engines: steps, and steps in which something differed, by name of what.
    """

    steps: int = 0
    request_steps: int = 0
    preemptions: int = 0
    forced_preemptions: int = 0
    completed: int = 0
    aborted: int = 0
    guard_skips: int = 0
    stock_against_edit: collections.Counter[str] = field(default_factory=collections.Counter)
    swap_against_edit: collections.Counter[str] = field(default_factory=collections.Counter)
    swap_on_last_rank: collections.Counter[str] = field(default_factory=collections.Counter)
    drift: collections.Counter[str] = field(default_factory=collections.Counter)
    masks_part: collections.Counter[str] = field(default_factory=collections.Counter)
    guards_part: collections.Counter[str] = field(default_factory=collections.Counter)
    stock_parts: list[tuple[int, int, int]] = field(default_factory=list)
    """
    By engine: the first step with drift, with a mask and with a guard that is not the last rank's.
    """


@pytest.fixture(scope="module")
def tally(harness: ModuleType, config: Any, tmp_path_factory: pytest.TempPathFactory) -> Tally:
    """
    Stock code, edited source and swapped code side by side on the first rank, stock and swapped code on the last.
    """
    swapped = harness.GPUModelRunner._update_states
    stock = harness.duplicate(swapped)
    edited = harness.edited_source(tmp_path_factory.mktemp("source"))
    fix = TrimFix(swapped)
    assert fix.set(applied=True) is MitigationState.APPLIED
    try:
        counted = Tally()
        for seed in range(SEEDS):
            last = [harness.Rank(config, update, last=True) for update in (stock, swapped)]
            first = [harness.Rank(config, update, last=False) for update in (stock, edited, swapped)]
            engine = harness.Engine(config, seed, ARRIVALS[seed % len(ARRIVALS)], last, first)
            _count(counted, engine)
    finally:
        fix.set(applied=False)
    print(f"\n{counted}")
    return counted


def _count(tally: Tally, engine: Any) -> None:
    firsts: dict[str, int] = {}
    for step, (last, last_swapped, stock, edited, swapped) in enumerate(engine.steps(STEPS)):
        tally.steps += 1
        tally.request_steps += len(last.masked)
        tally.guard_skips += not last.posted
        tally.stock_against_edit.update(stock.differs_in(edited) or {"nothing"})
        tally.swap_against_edit.update(swapped.differs_in(edited))
        tally.swap_on_last_rank.update(last_swapped.differs_in(last))
        for name, view in (("last", last), ("stock", stock), ("edited", edited), ("swapped", swapped)):
            tally.drift[name] += _drifts(view)
            tally.masks_part[name] += view.masked != last.masked
            tally.guards_part[name] += view.posted != last.posted
        for name, seen in (
            ("drift", _drifts(stock)),
            ("mask", stock.masked != last.masked),
            ("guard", stock.posted != last.posted),
        ):
            if seen:
                firsts.setdefault(name, step)
    tally.stock_parts.append((firsts["drift"], firsts["mask"], firsts["guard"]))
    tally.preemptions += engine.preemptions
    tally.forced_preemptions += engine.forced_preemptions
    tally.completed += engine.completed
    tally.aborted += engine.aborted


def test_run_is_long_and_varied(tally: Tally) -> None:
    """
    Over 5,000 steps, with requests that were preempted and resumed, aborted and finished, and steps that skip the guard.
    """
    assert tally.steps >= 5000
    assert tally.preemptions >= 50
    assert tally.forced_preemptions >= 10
    assert tally.completed >= 500
    assert tally.aborted >= 10
    assert tally.guard_skips >= 10


def test_swapped_code_equals_edited_source(tally: Tally) -> None:
    """
    No step leaves any difference in state, token arrays, block tables, mask or guard between code swap and edited source.
    """
    assert tally.swap_against_edit == {}, tally


def test_swapped_code_changes_nothing_on_the_last_rank(tally: Tally) -> None:
    """
    The last rank trims either way: with the swapped code it does what stock code does.
    """
    assert tally.swap_on_last_rank == {}, tally


def test_fixed_first_rank_agrees_with_the_last(tally: Tally) -> None:
    """
    Edited or swapped, the first rank never drifts, and its masks and guards are the last rank's in every step.
    """
    for name in ("edited", "swapped"):
        assert (tally.drift[name], tally.masks_part[name], tally.guards_part[name]) == (0, 0, 0), tally


def test_stock_first_rank_drifts_and_parts(tally: Tally) -> None:
    """
    Unpatched, the first rank drifts where the last does not, and then their masks and guards part.
    """
    assert tally.drift["last"] == 0
    assert tally.drift["stock"] > tally.steps / 2, tally
    assert tally.masks_part["stock"] > 500, tally
    assert tally.guards_part["stock"] > 100, tally


def test_comparison_sees_what_stock_code_does(tally: Tally) -> None:
    """
    The comparison is not blind: between stock code and edited source it finds lists, arrays, masks and guards that differ.
    """
    for name in (
        "output_token_ids",
        "token_ids_cpu",
        "is_token_ids",
        "num_tokens_no_spec",
        "discard_request_mask",
        "posted",
    ):
        assert tally.stock_against_edit[name] > 100, tally


def test_drift_comes_first(tally: Tally) -> None:
    """
    In every engine the drift shows before the first mask parts, and no guard parts before a mask does.
    """
    for drift, mask, guard in tally.stock_parts:
        assert drift < mask <= guard


@pytest.mark.parametrize("seed", [100, 101, 102])
def test_switched_in_mid_flight(harness: ModuleType, config: Any, fix: TrimFix, seed: int) -> None:
    """
    Turned on while requests drift, the very next step has no drift and agrees; turned off, the drift comes back.
    """
    update = harness.GPUModelRunner._update_states
    last, first = harness.Rank(config, update, last=True), harness.Rank(config, update, last=False)
    steps = harness.Engine(config, seed, 0.25, [last], [first]).steps(400)
    part = 100

    off = _stretch(steps, part, until_drift=True)
    fix.set(applied=True)
    on = _stretch(steps, 2 * part)
    fix.set(applied=False)
    off_again = _stretch(steps, part)

    for stretch in (off, off_again):
        assert any(_drifts(here) for _, here in stretch)
        assert any(there.masked != here.masked for there, here in stretch)
    assert _drifts(off[-1][1])  # so there was something to take back
    for there, here in on:
        assert not _drifts(here)
        assert (here.masked, here.posted) == (there.masked, there.posted)
    assert not any(_drifts(there) for there, _ in off + on + off_again)


def _drifts(view: Any) -> bool:
    return any(view.drift.values())


def _stretch(steps: Iterator[list[Any]], count: int, *, until_drift: bool = False) -> list[tuple[Any, Any]]:
    """
    The next `count` steps, and then on to one in which the first rank drifts if so wished.
    """
    taken: list[tuple[Any, Any]] = []
    for last, first in steps:
        taken.append((last, first))
        if len(taken) >= count and (not until_drift or _drifts(first)):
            break
    return taken


def test_no_hook_behind_the_function_does_the_same(harness: ModuleType, config: Any, tmp_path: Path) -> None:
    """
    Trimming after `_update_states` has returned leaves other tokens in the batch than the fix: they were written at wrong places.
    """
    stock = harness.duplicate(harness.GPUModelRunner._update_states)

    def trim_behind(runner: Any, output: Any) -> Any:
        correct = stock(runner, output)
        cached, batch = output.scheduled_cached_reqs, runner.input_batch
        for req_id, computed, length in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            state, row = runner.requests[req_id], batch.req_id_to_index[req_id]
            if length < len(state.output_token_ids):
                del state.output_token_ids[length:]
                batch.num_tokens_no_spec[row] = max(batch.num_prompt_tokens[row] + length, computed)
        return correct

    last = harness.Rank(config, stock, last=True)
    behind = harness.Rank(config, trim_behind, last=False)
    edited = harness.Rank(config, harness.edited_source(tmp_path), last=False)
    differ = collections.Counter[str]()
    for _, one, other in harness.Engine(config, 7, 0.25, [last], [behind, edited]).steps(200):
        differ.update(one.differs_in(other))

    assert differ["drift"] == differ["posted"] == 0
    assert differ["token_ids_cpu"] > 20


def test_mask_is_computed_as_assumed(harness: ModuleType) -> None:
    """
    The release still discards by `seq_len < num_tokens`, in the statement at which the harness cuts `_prepare_inputs` off.
    """
    tree = ast.parse(harness.SOURCE.read_text())
    [definition] = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_prepare_inputs")

    assert ast.unparse(harness.mask_statement(definition)) == (
        "self.discard_request_mask.np[:num_reqs] = self.optimistic_seq_lens_cpu[:num_reqs].numpy() < num_tokens_np"
    )
