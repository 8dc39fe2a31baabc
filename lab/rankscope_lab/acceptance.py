"""
Which drafts are right: a pure function of seed, request and place, so that a request repeats whatever its batch does.

A drafter with a model is like that too: greedy, its drafts follow from what it reads, not from who else is there.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rankscope_lab.counting import ANCHOR, CYCLE, FIRST, LAST

_STRIDE, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def drafts(
    prompts: Sequence[Sequence[int]], next_tokens: npt.NDArray[np.int32], count: int, *, acceptance: float, seed: int
) -> npt.NDArray[np.int32]:
    """
    `count` draft tokens after each of `next_tokens`; each is right with probability `acceptance` (0 to 1).

    A wrong draft is never right by chance. A request whose prompt begins with `ANCHOR` gets right drafts only.
    """
    places = np.arange(1, count + 1)
    right = (FIRST + (next_tokens.astype(np.int64)[:, None] - FIRST + places) % CYCLE).astype(np.int32)
    wrong = np.where(right == LAST, FIRST, LAST).astype(np.int32)
    salt = np.array([_salt(prompt, seed) for prompt in prompts], np.uint64)
    draws = _uniform(
        salt[:, None] + next_tokens.astype(np.uint64)[:, None] * np.uint64(8191) + places.astype(np.uint64)
    )
    always = np.array([bool(prompt) and prompt[0] == ANCHOR for prompt in prompts], bool)
    return np.where((draws < acceptance) | always[:, None], right, wrong)


def _salt(prompt: Sequence[int], seed: int) -> int:
    text = (len(prompt), prompt[0], prompt[-1], seed) if prompt else (0, 0, 0, seed)
    salt = 0
    for value in text:
        salt = (salt * 1_000_003 + value + 1) % (1 << 62)
    return salt << 1


def _uniform(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    mixed = keys * _STRIDE
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    result: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return result
