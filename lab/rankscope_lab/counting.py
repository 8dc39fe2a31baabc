"""
The language that the lab's target speaks: it counts. Token t is followed by t + 1, the last one by `FIRST`.

Every token that a correct engine returns is therefore known beforehand, and so is every good draft.
"""

from collections.abc import Sequence

VOCABULARY = 512
FIRST, LAST = 10, VOCABULARY - 1
"""
The tokens that count. Those below `FIRST` are never predicted: they are free to mark a prompt.
"""
CYCLE = LAST - FIRST + 1

ANCHOR = 9
"""
A prompt that begins with this token is one whose drafts are all right, whatever the acceptance: it never drifts.
"""


def after(token: int, steps: int = 1) -> int:
    """
    The token that comes `steps` after `token`.
    """
    return FIRST + (token - FIRST + steps) % CYCLE


def wrong_tokens(prompt: Sequence[int], answer: Sequence[int]) -> int:
    """
    How many tokens of the answer are not what a correct engine puts at their place.
    """
    start = prompt[-1]
    return sum(token != after(start, place) for place, token in enumerate(answer, 1))
