"""
What goes into the store and comes out of it, as values.
"""

from dataclasses import dataclass

from rankscope_server.domain.model import RankId


@dataclass(frozen=True, slots=True)
class DesiredRow:
    """
    What operators asked for; `engine` is empty where every engine of the deployment is meant.
    """

    deployment: str
    engine: str
    desired: bool
    generation: int
    actor: str
    at_unix: float


@dataclass(frozen=True, slots=True)
class SampleRow:
    """
    One second of one rank.
    """

    deployment: str
    engine: str
    rank: RankId
    second: int
    drift_max: int
    state_max: int
    steps: int
    requests: int
