"""
What the forecast rests on: how long requests stay unmasked, turns of a batch, and chances that fit simulated engines.
"""

import numpy as np
import pytest
from bench_forecast import draw_workload
from drifting_engine import Workload, run_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_exporter.contract import Guard
from rankscope_server.domain.passage import GRID, chance_parted
from rankscope_server.domain.rates import estimate_rates
from rankscope_server.domain.turns import batches_in_turn, extract_turns
from rankscope_server.domain.unmasked import acceptance_of, curves


def test_requests_whose_drafts_are_all_right_stay_unmasked() -> None:
    """Without a rejected draft nothing drifts, and nothing is ever masked."""
    assert (curves(3, 1.0, 1.0).of(0) == 1.0).all()


def test_requests_whose_drafts_are_all_wrong_are_masked_in_the_second_turn() -> None:
    """Three rejected tokens are within the limit of three, six are not; from there on the drift never shrinks."""
    assert curves(3, 0.0, 0.0).of(0)[:4].tolist() == [1.0, 1.0, 0.0, 0.0]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_chances_are_chances(draft_tokens: int, acceptance: float, masked: float) -> None:
    """Whatever the acceptance, a curve lies between 0 and 1, and more drift is never better in the next turn."""
    found = curves(draft_tokens, acceptance, masked)
    assert ((found.unmasked >= 0.0) & (found.unmasked <= 1.0 + 1e-9)).all()
    assert (np.diff(found.unmasked[1, : draft_tokens + 1]) <= 1e-9).all()
    assert 0.0 <= found.returning <= 1.0


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.floats(0.05, 0.95))
def test_acceptance_is_found_again_from_what_is_rejected(draft_tokens: int, acceptance: float) -> None:
    """The mean number of rejected tokens tells the acceptance."""
    rejected = draft_tokens - sum(acceptance**n for n in range(1, draft_tokens + 1))
    assert acceptance_of(rejected, draft_tokens) == pytest.approx(acceptance, abs=0.02)


def test_rejected_tokens_are_read_from_the_drift() -> None:
    """Drift and masks of an engine give back its acceptance, also that of masked requests, whose input is wrong."""
    run = run_engine(
        Workload(5, acceptance=0.8, acceptance_masked=0.0, arrivals=60.0, pattern="regular", slots=128), 600
    )
    turns = extract_turns(run.first, run.last, 2)
    rates = estimate_rates(turns, 3)
    expected = 3 - (0.8 + 0.64 + 0.512)
    assert np.mean(rates.rejected) == pytest.approx(expected, rel=0.1)
    assert rates.rejected_masked == pytest.approx(3.0, rel=0.1)


def test_batches_that_take_turns_are_told_from_one() -> None:
    """Two batches of different sizes, or one that every step has."""
    run = run_engine(Workload(5, acceptance=0.8, arrivals=60.0, pattern="regular", slots=128), 200)
    assert batches_in_turn(run.first, 4) == 1
    pair = run.first.copy()
    for name in ("requests", "cached"):
        pair[name][1::2] += 40
    pair["new"], pair["finished"] = 0, 0
    assert batches_in_turn(pair, 4) == 2


def test_an_engine_ends_when_its_guards_differ() -> None:
    """The simulated engines drift before they are masked, and part in their last step and nowhere else."""
    run = run_engine(Workload(11, acceptance=0.6, arrivals=10.0), 2000)
    assert run.wedged
    assert run.drifting_from is not None
    assert (run.first["guard"][:-1] == run.last["guard"][:-1]).all()
    assert (int(run.first["guard"][-1]), int(run.last["guard"][-1])) == (Guard.SKIP, Guard.BROADCAST)


def test_the_chance_only_grows() -> None:
    """For engines of all kinds, at any step, the chance that it has come by then never falls, and stays within 0 and 1."""
    for seed in range(7_000, 7_012):
        workload = draw_workload(seed)
        run = run_engine(workload, 120)
        for steps in (5, len(run.first) // 2, len(run.first)):
            if steps < 5:
                continue
            turns = extract_turns(run.first[:steps], run.last[:steps], 2)
            parted = chance_parted(turns, workload.draft_tokens, estimate_rates(turns, workload.draft_tokens))
            assert parted.shape == GRID.shape
            assert (np.diff(parted) >= -1e-9).all()
            assert -1e-9 <= parted[0] <= parted[-1] <= 1.0 + 1e-9
