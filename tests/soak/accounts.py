"""
Where every step of every rank has gone: received, reported as lost, or neither, which is a gap that nobody was told of.
"""

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Phase
from rankscope_exporter.contract.http import StepsRank


class Fate(enum.IntEnum):
    """
    What became of a step, as far as a reader of `/v1/steps` can tell.
    """

    UNKNOWN = 0
    UNFINISHED = 1
    """Its record came, and said that the step had not left the runner; a rank that ends may leave one or a few."""
    LOST = 2
    """The exporter said that the ring does not hold it any more."""
    DONE = 3


@dataclass(slots=True)
class RankAccount:
    """
    The steps of one rank.
    """

    key: str
    engine: str
    pp_rank: int
    fates: bytearray = field(default_factory=lambda: bytearray(1))
    """`Fate` by step ordinal; there is no step 0."""
    hashes: dict[int, int] = field(default_factory=dict)
    """Batch hash by step ordinal, of steps that are done."""
    drift_max: int = 0
    trimmed: int = 0
    """Tokens that the trim fix took off: what drift would have been, had it not been applied."""
    lost_though_received: int = 0
    """Steps reported as lost that had been received whole."""
    sent_again_max: int = 0
    """Most steps of one answer that had been received whole before."""
    lives: list[str] = field(default_factory=list)
    """What the exporter said of the process, whenever that changed."""

    @property
    def last(self) -> int:
        """Ordinal of the last step that is accounted for."""
        return len(self.fates) - 1

    def take(self, head: StepsRank, records: npt.NDArray[np.void]) -> None:
        """
        Account for one answer.
        """
        if not self.lives or self.lives[-1] != head.life.value:
            self.lives.append(head.life.value)
        if not len(records):
            return
        first = int(records["step"][0])
        self._extend(int(records["step"].max()))
        for step in range(max(first - head.lost, 1), first):
            self.lost_though_received += self.fates[step] == Fate.DONE
            self.fates[step] = max(self.fates[step], Fate.LOST)
        again = 0
        for step, phase, batch_hash in zip(
            records["step"].tolist(), records["phase"].tolist(), records["batch_hash"].tolist(), strict=True
        ):
            again += self.fates[step] == Fate.DONE
            self.fates[step] = max(self.fates[step], Fate.DONE if phase == Phase.DONE else Fate.UNFINISHED)
            if phase == Phase.DONE:
                self.hashes[step] = batch_hash
        self.sent_again_max = max(self.sent_again_max, again)
        self.drift_max = max(self.drift_max, int(records["drift_max"].max()))
        self.trimmed = max(self.trimmed, int(records["trimmed_total"].max()))

    def _extend(self, step: int) -> None:
        self.fates.extend(bytes(max(0, step - self.last)))

    def count(self, fate: Fate) -> int:
        """
        Steps of that fate, of those up to `last`.
        """
        return self.fates.count(fate, 1)

    def unexplained(self, last_step: int) -> int:
        """
        Steps up to `last_step`, the last that the rank itself has begun, of which nothing was ever said.
        """
        return self.count(Fate.UNKNOWN) + max(0, last_step - self.last)


class Accounts:
    """
    The accounts of all ranks that were ever seen, by key.
    """

    def __init__(self) -> None:
        self.ranks: dict[str, RankAccount] = {}

    def take(self, head: StepsRank, records: npt.NDArray[np.void]) -> None:
        """
        Account for the part of one answer that is about one rank.
        """
        if head.key not in self.ranks:
            self.ranks[head.key] = RankAccount(head.key, head.engine, head.pp_rank)
        self.ranks[head.key].take(head, records)

    def total(self, fate: Fate) -> int:
        """
        Steps of that fate, over all ranks.
        """
        return sum(rank.count(fate) for rank in self.ranks.values())

    def unexplained(self, last_steps: dict[str, int]) -> dict[str, int]:
        """
        Ranks with gaps that were not reported, and how many steps; `last_steps` is what the ranks themselves have begun.
        """
        gaps = {
            key: self.ranks[key].unexplained(last) if key in self.ranks else last for key, last in last_steps.items()
        }
        gaps |= {key: rank.count(Fate.UNKNOWN) for key, rank in self.ranks.items() if key not in last_steps}
        return {key: gap for key, gap in gaps.items() if gap}

    def different_batches(self) -> tuple[int, int]:
        """
        Steps that two ranks of an engine both did, and how many of them had different batches.
        """
        common = different = 0
        engines: dict[str, dict[int, int]] = {}
        for rank in self.ranks.values():
            seen = engines.setdefault(rank.engine, {})
            for step, batch_hash in rank.hashes.items():
                common += step in seen
                different += seen.setdefault(step, batch_hash) != batch_hash
        return common, different
