"""
The chance that every request of a batch has been masked at once by some turn from now.

Requests go their own ways. So the chance that none is unmasked at a turn is a product over those that run now; for
those that arrive until then it follows from mean and spread of their number, as the last turns show them. That chance,
and how fast a batch without an unmasked request gets one again, give the chance that it has come about by then.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from rankscope_server.domain.rates import Rates
from rankscope_server.domain.turns import Turns
from rankscope_server.domain.unmasked import TURNS, Floats, acceptance_of, curves

GRID: Floats = np.concatenate([np.arange(17.0), np.geomspace(18.0, 1e7, 56)])
"""
Turns from now at which the chance is worked out.
"""

RECENT = 64
"""
Turns over which the number of masked requests is averaged.
"""

LAG = 2
"""
Turns after a request began to draft in which it cannot drift: the scheduler plans one turn ahead.
"""

MODEL_REQUESTS = 4.0
"""
Requests that the model's word on how long they stay unmasked counts for, beside those that were seen.
"""

MODEL_BLOCKS = 4.0
"""
The same for the spread of their number, which is that of arrivals by chance while little has been seen.
"""

_TURNS = np.arange(TURNS)
_LAGGING = np.maximum(_TURNS - LAG, 0)

_OFF = np.linspace(-2.0, 2.0, 5)
_FACTORS, _FACTOR_WEIGHTS = np.exp(_OFF), np.exp(-(_OFF**2) / 2)
"""Factors by which the chance may be off, as the model is not the engine, and how likely each is."""


@dataclass(frozen=True, slots=True)
class _Fate:
    """
    What becomes of requests under one acceptance, at the turns of `GRID`.
    """

    lost: Floats
    """Logarithm of the chance that none of those that run now is unmasked."""
    gone: Floats
    """Logarithm of the chance that all of those that run now have finished."""
    stay: Floats
    """Expected turns in the batch, until then, of a request that arrives now."""
    fresh: Floats
    """Expected turns unmasked, until then, of a request that arrives now."""
    fresh_all: float
    """The same without an end."""
    returning: float


def chance_parted(turns: Turns, draft_tokens: int, rates: Rates) -> Floats:
    """
    By turn of `GRID`, the chance that all requests of the batch have been masked on the rank and not on the last one.
    """
    fates = [
        _fate(turns, draft_tokens, rejected, rates.rejected_masked, finished)
        for rejected, finished in product(rates.rejected, rates.finished)
    ]
    arriving = np.array(rates.arriving).reshape(1, -1, 1, 1)
    exponent = np.array([_zero_exponent(spread) for spread in _spreads(turns)]).reshape(1, 1, -1, 1)
    none = np.exp(_stacked([fate.lost for fate in fates]) - exponent * arriving * _stacked([f.fresh for f in fates]))
    gone = np.exp(_stacked([fate.gone for fate in fates]) - arriving * _stacked([fate.stay for fate in fates]))
    returning = np.array([fate.returning for fate in fates]).reshape(-1, 1, 1, 1)
    back = arriving + returning * float(turns.masked[-RECENT:].mean())
    hazard = _passage(none, np.maximum(none - gone, 0.0), back)
    # What each would have made likely until now, and has not come.
    held = len(turns) - int((turns.masked > 0).argmax()) if turns.masked.any() else 0
    fresh_all = np.array([fate.fresh_all for fate in fates]).reshape(-1, 1, 1, 1)
    before = (held * back * np.exp(-exponent * arriving * fresh_all)).reshape(-1, 1)
    weight = _FACTOR_WEIGHTS * np.exp(-(before - before.min()) * _FACTORS)
    left = np.exp(-hazard.reshape(len(before), 1, -1) * _FACTORS[:, None])
    return np.asarray(1.0 - np.tensordot(weight, left, 2) / weight.sum())


def _stacked(curves_: Sequence[Floats]) -> Floats:
    """
    Curves of the fates, as (fate, arrivals, spread, turn).
    """
    return np.stack(curves_)[:, None, None, :]


def _fate(turns: Turns, k: int, rejected: float, rejected_masked: float, finished: float) -> _Fate:
    chain = curves(k, acceptance_of(rejected, k), acceptance_of(rejected_masked, k))
    alive = (1.0 - finished) ** GRID
    unmasked, masked = int(turns.unmasked[-1]), int(turns.masked[-1])
    drifting = min(max(int(turns.drifting[-1]) - masked, 0), unmasked)
    new = min(int(turns.arrived[-LAG:].sum()), unmasked - drifting)
    fresh = chain.of(0)[_LAGGING]
    living = fresh * (1.0 - finished) ** _TURNS
    ever = living[-1] * (1.0 - finished) / finished
    model = float(living.sum()) + ever
    stretch = _stretch(turns, model)
    at = GRID / stretch
    below = np.minimum(at.astype(np.int64), TURNS - 2)
    part = np.minimum(at - below, 1.0)
    lost = np.zeros(len(GRID))
    for count, curve in (
        (new, fresh),
        (unmasked - drifting - new, chain.of(0)),
        (drifting, chain.young),
        (masked, chain.of(round(int(turns.drift_sum[-1]) / max(masked, 1)))),
    ):
        if count:
            chance = alive * (curve[below] + part * (curve[below + 1] - curve[below]))
            lost += count * np.log(np.maximum(1.0 - chance, 1e-9))
    summed = np.cumsum(living)
    beyond = ever * (1.0 - (1.0 - finished) ** np.maximum(at - TURNS, 0.0))
    return _Fate(
        lost,
        (unmasked + masked) * np.log(np.maximum(1.0 - alive, 1e-9)),
        (1.0 - alive) / finished,
        stretch * (summed[below] - living[below] + part * living[below] + beyond),
        stretch * model,
        chain.returning / stretch,
    )


def _stretch(turns: Turns, model: float) -> float:
    """
    How many times longer than in the model requests stay unmasked: the turns that were seen over the requests that came.
    """
    arrived = float(turns.arrived[1:].sum()) + float(turns.unmasked[0])
    seen = float(turns.unmasked.sum()) + 0.7 * model * float(turns.unmasked[-1])
    mean = (seen + MODEL_REQUESTS * model) / (arrived + MODEL_REQUESTS)
    return min(max(mean / model, 0.4), 6.0)


def _spreads(turns: Turns) -> tuple[float, float]:
    """
    Variance over mean of how many requests are unmasked (1 for arrivals by chance, less for regular ones), a standard
    deviation of its logarithm below and above.
    """
    steady = turns.unmasked[int((turns.masked > 0).argmax()) :] if turns.masked.any() else turns.unmasked[-1:]
    mean = float(steady.mean())
    blocks = min(float(turns.arrived[1:].sum()), len(steady) / 8.0) if len(steady) > 16 else 0.0
    seen = float(steady.var()) / mean if mean > 0 else 1.0
    spread = max(0.02, (blocks * seen + MODEL_BLOCKS) / (blocks + MODEL_BLOCKS))
    error = math.exp(math.sqrt(2.0 / (blocks + MODEL_BLOCKS)))
    return spread / error, spread * error


def _zero_exponent(spread: float) -> float:
    """
    The chance that a count is zero is e to the power of minus its mean times this: binomial, Poisson or negative binomial.
    """
    return 1.0 if abs(spread - 1.0) < 1e-6 else math.log(spread) / (spread - 1.0)


def _passage(none: Floats, parted: Floats, back: Floats) -> Floats:
    """
    Minus the logarithm of the chance that it has not come about; turns of `GRID` are the last axis of all.

    `none` is the chance that no request is unmasked, `parted` that moreover one is there, `back` the rate at which one
    comes or returns: what flows into that state is what it holds more, and what has flowed out of it again.
    """
    flow = 0.5 * back * (parted[..., 1:] + parted[..., :-1]) * np.diff(GRID)
    step = np.diff(parted)
    left = np.maximum(1.0 - none[..., :-1], 1e-6)
    risen = -np.log1p(-np.minimum(np.maximum(step, 0.0) / left, 1.0 - 1e-9))
    stayed = np.maximum(flow + np.minimum(step, 0.0), 0.0) / left
    passed = np.zeros(none.shape)
    np.cumsum(risen + stayed, axis=-1, out=passed[..., 1:])
    return passed
