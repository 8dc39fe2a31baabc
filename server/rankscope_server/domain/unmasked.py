"""
How long a request stays unmasked on a rank that is not the last: a Markov chain of its drift.

In each turn of its batch a request drifts by the draft tokens that were rejected. It is masked once the drift is above
the number of draft tokens. From then on the rank misses one sampled token a turn, which takes one off the growth: where
all drafts are right the drift shrinks, and the request may come back.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TURNS = 256
"""
Turns that are followed one by one; what is left then stays as it is.
"""

BEYOND = 24
"""
Tokens above the limit that are told apart; a request that is further off does not come back within `TURNS`.
"""

GRAIN = 40
"""
Acceptances are rounded to one part in so many, so that curves can be kept.
"""

_ACCEPTANCES: Floats = np.linspace(0.0, 1.0, GRAIN + 1)


@dataclass(frozen=True, slots=True)
class Curves:
    """
    Chances of a request with a given drift now, for each of the turns that come.
    """

    unmasked: Floats
    """By turn (0: now) and drift (0 to the largest that is told apart): the chance of being unmasked then."""
    young: Floats
    """By turn, the chance of one that drifts and is unmasked now: any of the drifts that are possible then."""
    returning: float
    """Chance per turn that a masked request comes back, averaged over those that were masked not long ago."""

    def of(self, drift: int) -> Floats:
        """
        The curve of a request with this drift.
        """
        return self.unmasked[:, min(max(drift, 0), self.unmasked.shape[1] - 1)]


def acceptance_of(rejected: float, draft_tokens: int) -> float:
    """
    The chance of a draft token to be accepted, given that those before it were, at which so many are rejected a turn.
    """
    return float(np.interp(rejected, _expected(draft_tokens), _ACCEPTANCES[::-1]))


@lru_cache(maxsize=64)
def _expected(draft_tokens: int) -> Floats:
    """
    Tokens rejected at each of `_ACCEPTANCES`, from the largest of them on.
    """
    return np.asarray(draft_tokens - (_ACCEPTANCES[::-1, None] ** np.arange(1, draft_tokens + 1)).sum(axis=1))


def curves(draft_tokens: int, acceptance: float, acceptance_masked: float) -> Curves:
    """
    The curves at these acceptances (0 to 1) of unmasked and of masked requests, rounded to one part in `GRAIN`.
    """
    return _curves(draft_tokens, round(acceptance * GRAIN), round(acceptance_masked * GRAIN))


@lru_cache(maxsize=256)
def _curves(draft_tokens: int, grains: int, grains_masked: int) -> Curves:
    states = draft_tokens + 1 + BEYOND
    chain = np.zeros((states, states))
    for drift in range(states):
        masked = drift > draft_tokens
        for rejected, chance in enumerate(_rejections(draft_tokens, (grains_masked if masked else grains) / GRAIN)):
            chain[drift, min(drift + rejected - masked, states - 1)] += chance
    chain[-1] = 0.0
    chain[-1, -1] = 1.0
    unmasked = np.zeros((TURNS, states))
    unmasked[0, : draft_tokens + 1] = 1.0
    for turn in range(1, TURNS):
        unmasked[turn] = chain @ unmasked[turn - 1]
    return Curves(unmasked, unmasked[:, 1 : draft_tokens + 1].mean(axis=1), _returning(chain, draft_tokens))


def _rejections(draft_tokens: int, acceptance: float) -> Floats:
    """
    The chances of 0, 1, ... `draft_tokens` rejected tokens: all that follow the first wrong one.
    """
    accepted = acceptance ** np.arange(draft_tokens + 1) * (1.0 - acceptance)
    accepted[draft_tokens] = acceptance**draft_tokens
    return np.asarray(accepted[::-1])


def _returning(chain: Floats, draft_tokens: int) -> float:
    state = np.zeros(len(chain))
    state[0] = 1.0
    came_back = masked = 0.0
    for _ in range(64):
        came_back += float(state[draft_tokens + 1 :] @ chain[draft_tokens + 1 :, : draft_tokens + 1].sum(axis=1))
        masked += float(state[draft_tokens + 1 :].sum())
        state = state @ chain
    return came_back / masked if masked > 0 else 0.0
