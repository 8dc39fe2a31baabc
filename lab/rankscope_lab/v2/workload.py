"""
Seeded requests for a run without a server: long and short prompts, some that n-grams predict well, some that end early.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope_lab.counting import FIRST, LAST, after


@dataclass(frozen=True, slots=True)
class Request:
    """
    One request of a run.
    """

    name: str
    prompt: tuple[int, ...]
    tokens: int
    """How many it asks for."""
    abort_after: int | None = None
    """It is aborted once so many of them have come; None: it runs to its end."""


LONGEST_PROMPT, LONGEST_ANSWER = 120, 24
BLOCK = 32
"""
Tokens of a KV block.
"""


def draw(count: int, *, seed: int, context: int, aborted: float = 0.2, answer: int = 0) -> list[Request]:
    """
    `count` requests for a model that counts, none longer than `context`. `aborted` is the share of those that are aborted
    midway; `answer` tokens are asked for, 0: each asks for another number.

    Most prompts are just short of a whole KV block, so that they ask for another one once they run, and some of them must
    give theirs up where blocks are few. Half of the prompts contain the answer, with a wrong token here and there, so that drafts from n-grams are partly right.
    """
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        tokens = answer or rng.randint(2, LONGEST_ANSWER)
        length = rng.randint(2, LONGEST_PROMPT)
        if rng.random() < 0.6:
            length = BLOCK * rng.randint(1, LONGEST_PROMPT // BLOCK) - rng.randint(0, 4)
        length = min(length, context - tokens - 1)
        prompt = [rng.randint(FIRST, LAST) for _ in range(length)]
        if rng.random() < 0.5:
            run = [after(prompt[-1], place) for place in range(-2, tokens)]
            run = [token if rng.random() < 0.9 else rng.randint(FIRST, LAST) for token in run][: max(length - 4, 0)]
            prompt[: len(run)] = run
        early = rng.randrange(1, tokens) if rng.random() < aborted else None
        requests.append(Request(f"r{number}", tuple(prompt), tokens, early))
    return requests


def scheduled_tokens(requests: Sequence[Request]) -> int:
    """
    How many tokens a scheduler hands out for requests that run to their end, if it does so once: the last token that a
    request gets is never computed.
    """
    return sum(len(request.prompt) + request.tokens - 1 for request in requests)
