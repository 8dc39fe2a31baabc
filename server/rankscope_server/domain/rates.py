"""
What the last turns of a batch say about those to come: how fast requests drift, finish and arrive.
"""

import math
from dataclasses import dataclass

import numpy as np

from rankscope_server.domain.turns import Ints, Turns
from rankscope_server.domain.unmasked import Floats

RECENT = (4, 16, 64)
"""
Numbers of turns whose arrivals count as much as those of all turns that are known: traffic changes, and has lulls.
"""

USUAL_WEIGHT = 2.0
"""
Turns of a request's drafts that the usual acceptance counts for, beside those that were seen.
"""

CHANCE_GAPS = 1.0
"""
Gaps between arrivals that the assumption counts for that they come by chance.
"""

MOST_ARRIVING = 64
"""
Arrivals in one turn that are told apart.
"""

MOST_FINISHING = 0.5
"""
The largest chance to finish in a turn that is believed.
"""

LEAST_GAPS = 8
"""
Gaps that it takes to tell lulls from chance.
"""

ALIKE_FINISHED = 8.0
"""
Requests that have finished, from which on it is known about how long they run.
"""


@dataclass(frozen=True, slots=True)
class Lulls:
    """
    The longest gaps between arrivals, in turns: a `share` of gaps is `longer` than that, by `excess` on average.
    """

    share: float
    longer: float
    excess: float


@dataclass(frozen=True, slots=True)
class Rates:
    """
    Per turn of the batch; where there are several values, each is as likely: a value that is not known for certain is
    taken a standard deviation below and above.
    """

    rejected: tuple[float, ...]
    """Draft tokens rejected per unmasked request."""
    rejected_masked: float
    """The same per masked request."""
    finished: tuple[float, ...]
    """Chance of a request to finish."""
    arriving: tuple[float, ...]
    """Requests that arrive."""
    burstiness: float
    """Variance over squared mean of the turns between two arrivals: 0 if they are regular, 1 if they come by chance."""
    lulls: Lulls
    turn_seconds: float


def estimate_rates(turns: Turns, draft_tokens: int) -> Rates:
    """
    Rates, each leaning on what is usual while little has been seen.
    """
    rejected, drafts, drafts_masked = turns.rejected
    mean, mean_masked = _fit_rejections(rejected, drafts, drafts_masked, draft_tokens / 2)
    error = 0.6 * draft_tokens / math.sqrt(float(drafts.sum()) + 4.0)
    present = float((turns.unmasked + turns.masked).sum())
    spans = np.diff(turns.begin_ns) / 1e9
    since = turns.arrived[1:]  # what the first turn brings was there before
    return Rates(
        rejected=tuple(min(max(mean + off, 0.0), float(draft_tokens)) for off in (-error, error)),
        rejected_masked=min(max(mean_masked, 0.0), float(draft_tokens)),
        finished=_finishing(float(turns.finished[1:].sum()), present, len(turns)),
        arriving=tuple(rate for most in (*RECENT, len(turns)) for rate in _arriving(since[-most:])),
        burstiness=_burstiness(since),
        lulls=_lulls(since),
        turn_seconds=max(1e-4, float(np.minimum(spans, 10 * _middle(spans)).mean())),
    )


def _middle(values: Floats) -> float:
    return float(np.partition(values, len(values) // 2)[len(values) // 2])


def _finishing(finished: float, present: float, age: int) -> tuple[float, float]:
    """
    The chance if each request goes its own way, and if they began together and are alike, as far as that may be: then
    all of them together have told no more than one that has run for `age` turns.
    """
    alike = age + (present - age) * finished / (finished + ALIKE_FINISHED)
    return min(MOST_FINISHING, (finished + 0.5) / (present + 100.0)), min(
        MOST_FINISHING, (finished + 1.0) / (alike + 20.0)
    )


def _arriving(arrived: Ints) -> tuple[float, float]:
    """
    Low and high rate.
    """
    count, length = float(arrived.sum()) + 0.25, max(1, len(arrived))
    error = math.sqrt(count + 0.25)
    return max(0.02, count - error) / length, (count + error) / length


def _burstiness(arrived: Ints) -> float:
    """
    Variance over squared mean of the gaps, which leans on that of arrivals by chance while few were seen.
    """
    at = np.repeat(np.arange(len(arrived)), np.minimum(arrived, MOST_ARRIVING))
    if len(at) < 3:
        return 1.0
    gaps = np.diff(at)
    # Turns are counted whole: of two regular arrivals one is up to half a turn early or late.
    varying = max(0.0, float(gaps.var()) - 1.0 / 6.0) / max(float(gaps.mean()) ** 2, 1e-9)
    return (len(gaps) * varying + CHANCE_GAPS) / (len(gaps) + CHANCE_GAPS)


def _lulls(arrived: Ints) -> Lulls:
    """
    The longest fifth of the gaps; while few were seen, gaps by chance.
    """
    at = np.flatnonzero(arrived)
    gaps = np.diff(np.append(at, len(arrived)))  # the last one has not ended yet
    usual = (len(arrived) + 1.0) / (float(arrived.sum()) + 1.0)
    if len(gaps) < LEAST_GAPS:
        return Lulls(1.0, 0.0, usual)
    longer = float(np.partition(gaps, -len(gaps) // 5)[-len(gaps) // 5])
    beyond = gaps[gaps > longer]
    excess = (float((beyond - longer).sum()) + 0.5 * usual) / (len(beyond) + 0.5)
    return Lulls((len(beyond) + 0.5) / (len(gaps) + 1.0), longer, excess)


def _fit_rejections(rejected: Ints, drafts: Ints, masked: Ints, usual: float) -> tuple[float, float]:
    """
    Rejected tokens per turn of an unmasked and of a masked request: the least squares, with `usual` thrown in for
    unmasked ones, and both tied to each other, as they are alike unless the turns say otherwise.
    """
    weight = 1.0 / np.maximum(drafts + masked, 1)
    both = float((weight * drafts * masked).sum()) - USUAL_WEIGHT
    one = float((weight * drafts * drafts).sum()) + 2 * USUAL_WEIGHT
    other = float((weight * masked * masked).sum()) + USUAL_WEIGHT
    found = float((weight * drafts * rejected).sum()) + USUAL_WEIGHT * usual
    found_masked = float((weight * masked * rejected).sum())
    determinant = one * other - both * both
    return (other * found - both * found_masked) / determinant, (one * found_masked - both * found) / determinant
