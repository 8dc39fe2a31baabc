"""
The lab's arithmetic, without vLLM: what a right answer is, and which drafts are right.
"""

import numpy as np
import pytest

from rankscope_lab.acceptance import drafts
from rankscope_lab.counting import ANCHOR, FIRST, LAST, after, wrong_tokens
from rankscope_lab.relay import Knobs

PROMPTS = [[FIRST + place % 400, FIRST + place % 400 + 1] for place in range(2000)]
NEXT = np.array([prompt[-1] + 1 for prompt in PROMPTS], np.int32)


def right(next_tokens: np.ndarray, count: int) -> np.ndarray:
    return np.array([[after(int(token), place) for place in range(1, count + 1)] for token in next_tokens], np.int32)


def test_counting_wraps_past_the_last_token() -> None:
    """The last token is followed by the first that counts."""
    assert after(LAST) == FIRST
    assert after(LAST - 1, 3) == FIRST + 1


def test_an_answer_is_wrong_from_the_place_where_a_token_is_missing() -> None:
    """Each token is judged at its place, so one that is skipped makes all later ones wrong."""
    assert wrong_tokens([20, 21], [22, 23, 24]) == 0
    assert wrong_tokens([20, 21], [22, 24, 25]) == 2
    assert wrong_tokens([20, 21], []) == 0


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 0.97, 1.0])
def test_the_share_of_right_drafts_is_the_acceptance(acceptance: float) -> None:
    """Over many requests, each draft is right as often as asked."""
    share = (drafts(PROMPTS, NEXT, 3, acceptance=acceptance, seed=1) == right(NEXT, 3)).mean(axis=0)
    assert share == pytest.approx([acceptance] * 3, abs=0.05)


def test_drafts_of_a_request_do_not_depend_on_its_batch() -> None:
    """A request repeats, whoever else is in the batch; another seed gives other drafts."""
    together = drafts(PROMPTS, NEXT, 3, acceptance=0.5, seed=1)
    alone = np.concatenate(
        [drafts([prompt], NEXT[place : place + 1], 3, acceptance=0.5, seed=1) for place, prompt in enumerate(PROMPTS)]
    )
    assert (together == alone).all()
    assert (together != drafts(PROMPTS, NEXT, 3, acceptance=0.5, seed=2)).any()


def test_anchors_get_right_drafts_only() -> None:
    """A request that begins with the anchor token never drifts, whatever the acceptance."""
    prompts = [[ANCHOR, *prompt] for prompt in PROMPTS]
    assert (drafts(prompts, NEXT, 3, acceptance=0.0, seed=1) == right(NEXT, 3)).all()


def test_a_wrong_draft_is_a_token_that_counts() -> None:
    """Wrong drafts are wrong for certain, and within the vocabulary."""
    wrong = drafts(PROMPTS, NEXT, 3, acceptance=0.0, seed=1)
    assert (wrong != right(NEXT, 3)).all()
    assert set(np.unique(wrong)) <= set(range(FIRST, LAST + 1))


def test_knobs_out_of_range_are_refused() -> None:
    """A relay with an impossible acceptance or pace does not start."""
    assert Knobs.read({"LAB_ACCEPT": "0.5", "LAB_PACE_MS": "30"}) == Knobs(acceptance=0.5, pace_seconds=0.03)
    with pytest.raises(ValueError, match="LAB_ACCEPT"):
        Knobs.read({"LAB_ACCEPT": "1.5"})
    with pytest.raises(ValueError, match="LAB_PACE_MS"):
        Knobs.read({"LAB_PACE_MS": "-1"})
