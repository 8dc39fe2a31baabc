"""
What a forecast says: the values of `forecast`.
"""

import enum
from dataclasses import dataclass


class Outlook(str, enum.Enum):
    """
    Whether the step at which every request of a batch is masked on a rank, and the ranks part, can be foreseen.
    """

    IN_SIGHT = "in sight"
    NOT_IN_SIGHT = "not in sight"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Forecast:
    """
    How long it takes until every request of a running batch is masked on a rank, if traffic goes on as it does.
    """

    outlook: Outlook
    reason: str
    """What it rests on, or why nothing can be said: a phrase that pages show."""
    earliest_seconds: float | None = None
    """From now; None unless the outlook is `in sight`."""
    latest_seconds: float | None = None
    rank: str = ""
    """Label of the rank whose requests run out first; empty unless the outlook is `in sight`."""


OPEN_SECONDS = 3600.0
"""
An interval that ends later than this helps nobody to plan: only where it begins is told.
"""

UNFORESEEN = Forecast(Outlook.UNKNOWN, "nothing has been seen of the engine yet")
