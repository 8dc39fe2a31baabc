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

from rankscope_server.domain.rates import Lulls, Rates
from rankscope_server.domain.turns import Turns
from rankscope_server.domain.unmasked import TURNS, Floats, acceptance_of, curves

GRID: Floats = np.concatenate([np.arange(13.0), np.geomspace(14.0, 1e7, 32)])
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

LEAST_SPREAD = 0.005
"""
Arrivals are never so regular that less varies.
"""

MODEL_BLOCKS = 4.0
"""
The same for the spread of their number, which is that of arrivals by chance while little has been seen.
"""

FULL_WEIGHT, LULL_WEIGHT = 2.0, 0.3
"""
How likely it is that no more arrive than finish, and that lulls are as the longest gaps between arrivals have it, where
each other value counts one.
"""

_TURNS = np.arange(TURNS)
_LAGGING = np.maximum(_TURNS - LAG, 0)

_FACTORS, _FACTOR_WEIGHTS = np.exp([-0.9, 0.8, 2.5]), np.array([1.0, 4.0, 1.0])
"""
Factors by which the chance may be off, as the model is not the engine, and how likely each is. On simulated engines it
comes about twice as often as the model says: requests that began together are masked together, and traffic has lulls.
"""


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
    exponents: tuple[float, float]
    """The chance that no request is unmasked, of those that arrive, is e to the power of minus their mean times this."""
    returning: float


def chance_parted(turns: Turns, draft_tokens: int, rates: Rates) -> Floats:
    """
    By turn of `GRID`, the chance that all requests of the batch have been masked on the rank and not on the last one.
    """
    seen = _seen_spread(turns)
    fates = [
        _fate(turns, draft_tokens, rates, seen, rejected, finished)
        for rejected, finished in product(rates.rejected, rates.finished)
    ]
    fresh, fresh_all = _by_fate([fate.fresh for fate in fates]), _by_fate([fate.fresh_all for fate in fates])
    arriving = _arriving(turns, rates)
    exponent = np.array([fate.exponents for fate in fates])[:, None, :, None]
    empty = _empty(exponent, arriving, fresh, rates.lulls)
    none = np.exp(_by_fate([fate.lost for fate in fates]) + empty)
    gone = np.exp(_by_fate([fate.gone for fate in fates]) - arriving * _by_fate([fate.stay for fate in fates]))
    back = arriving + _by_fate([fate.returning for fate in fates]) * float(turns.masked[-RECENT:].mean())
    hazard = _passage(none, np.maximum(none - gone, 0.0), np.broadcast_to(back, (*none.shape[:-1], 1)))
    # What each would have made likely until now, and has not come.
    held = len(turns) - int((turns.masked > 0).argmax()) if turns.masked.any() else 0
    before = (held * back * np.exp(_empty(exponent, arriving, fresh_all, rates.lulls))).reshape(-1, 1)
    likely = np.broadcast_to(_likely(rates), none.shape[:-1]).reshape(-1, 1)
    weight = likely * _FACTOR_WEIGHTS * np.exp(-(before - before.min()) * _FACTORS)
    left = np.exp(-hazard.reshape(len(before), 1, -1) * _FACTORS[:, None])
    return np.asarray(1.0 - np.tensordot(weight, left, 2) / weight.sum())


def _arriving(turns: Turns, rates: Rates) -> Floats:
    """
    Requests that arrive per turn, as (fate, value, 1, 1): as they did, and as many as finish, for a batch that grows
    gets full.
    """
    present = float(turns.unmasked[-1] + turns.masked[-1])
    return np.array([[*rates.arriving, present * finished] for _, finished in product(rates.rejected, rates.finished)])[
        :, :, None, None
    ]


def _likely(rates: Rates) -> Floats:
    """
    How likely each value of arrivals is, and each way to tell a lull, as (value, way).
    """
    return np.outer([*np.ones(len(rates.arriving)), FULL_WEIGHT], [1.0, 1.0, LULL_WEIGHT])


def _empty(exponent: Floats, arriving: Floats, fresh: Floats, lulls: Lulls) -> Floats:
    """
    Logarithm of the chance that no request that arrives from now on is unmasked, as (fate, arrivals, way, turn).

    Told in three ways: twice by mean and spread of their number, and by the chance of a lull as long as a request stays.
    """
    numbers = -exponent * arriving * fresh
    lull = np.minimum(0.0, math.log(lulls.share) - (fresh - lulls.longer) / lulls.excess)
    return np.concatenate([numbers, np.broadcast_to(lull, (*numbers.shape[:2], 1, numbers.shape[3]))], axis=2)


def _by_fate(values: Sequence[Floats] | Sequence[float]) -> Floats:
    """
    Curves (or single values) of the fates, as (fate, 1, 1, turn).
    """
    return np.reshape(np.array(values), (len(values), 1, 1, -1))


def _fate(turns: Turns, k: int, rates: Rates, seen: tuple[float, float], rejected: float, finished: float) -> _Fate:
    chain = curves(k, acceptance_of(rejected, k), acceptance_of(rates.rejected_masked, k))
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
        _exponents(seen, 1.0 - (1.0 - rates.burstiness) * float((living**2).sum()) / float(living.sum())),
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


def _seen_spread(turns: Turns) -> tuple[float, float]:
    """
    Variance over mean of how many requests are unmasked since the batch is steady, and from how many independent turns.
    """
    steady = turns.unmasked[max(int((turns.masked > 0).argmax()), len(turns) // 2) :]
    mean = float(steady.mean())
    if len(steady) <= 16 or mean == 0.0:
        return 1.0, 0.0
    return float(steady.var()) / mean, min(float(turns.arrived[1:].sum()), len(steady) / 8.0)


def _exponents(seen: tuple[float, float], model: float) -> tuple[float, float]:
    """
    As `_zero_exponent`, for a spread that is a standard deviation of its logarithm low, and high.

    `model` is the spread that follows from how regular the arrivals are.
    """
    spread, blocks = seen
    likely = max(LEAST_SPREAD, (blocks * spread + MODEL_BLOCKS * model) / (blocks + MODEL_BLOCKS))
    error = math.exp(math.sqrt(2.0 / (blocks + MODEL_BLOCKS)))
    return _zero_exponent(likely / error), _zero_exponent(likely * error)


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
