"""
What looking at an engine yields, before `findings` gives it a life.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankscope_server.domain.facts import RankFacts
from rankscope_server.domain.model import Evidence, FindingKind, RankValue, Severity

STICKY = (
    FindingKind.GUARD_DISAGREEMENT,
    FindingKind.MASK_DISAGREEMENT,
    FindingKind.WIDTH_MISMATCH,
    FindingKind.BATCH_MISMATCH,
)
"""
Findings that stay open for the engine's life: what they say cannot become untrue.
"""


@dataclass(frozen=True, slots=True)
class Assessed:
    """
    A finding as it shows itself now.
    """

    kind: FindingKind
    group: int
    """Data-parallel rank whose ranks it is about; -1 where it is about the whole engine."""
    severity: Severity
    sentence: str
    step: int | None
    ranks: tuple[RankFacts, ...]
    since_unix: float
    evidence: Evidence

    @property
    def key(self) -> tuple[FindingKind, int]:
        """What there is at most one finding of."""
        return self.kind, self.group


def values_of(ranks: Sequence[RankFacts], words: Iterable[str]) -> tuple[RankValue, ...]:
    """
    The word of each rank.
    """
    return tuple(RankValue(rank.id, rank.label, word) for rank, word in zip(ranks, words, strict=True))
