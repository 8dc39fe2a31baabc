"""
Saved files beside each other: which belong to one engine, which of them count, and what is missing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope_exporter.contract import RankIdentity
from rankscope_server.domain.facts import joined, rank_labels
from rankscope_server.domain.model import RankId
from rankscope_server.replay.saved import SavedRank
from rankscope_server.replay.taken import Taken

SKEW_SECONDS = 2.0
"""
Ranks begin a step within some step times of each other: by how much their nodes' wall clocks may differ before that is
put right.
"""


@dataclass(frozen=True, slots=True, eq=False)
class EngineRank:
    """
    A rank of an engine that is to be replayed.
    """

    saved: SavedRank
    taken: Taken
    label: str = ""
    shift_ns: int = 0
    """What its wall clock is put forward by, so that it agrees with that of the engine's first rank."""

    def unix_ns(self, ns: int) -> int:
        """
        A time of its node's monotonic clock on the engine's common axis: nanoseconds since 1970.
        """
        return ns - self.saved.created_ns + round(self.saved.created_unix * 1e9) + self.shift_ns

    def node_ns(self, unix_ns: int) -> int:
        """
        The opposite of `unix_ns`.
        """
        return unix_ns - self.shift_ns - round(self.saved.created_unix * 1e9) + self.saved.created_ns


@dataclass(frozen=True, slots=True, eq=False)
class SavedEngine:
    """
    An engine that is to be replayed: its ranks in order, and what a reader must know about them.
    """

    name: str
    ranks: tuple[EngineRank, ...]
    missing: tuple[RankId, ...] = ()
    """Ranks that it had, and of which no file is there."""
    notes: tuple[str, ...] = ()

    @property
    def identity(self) -> RankIdentity:
        """Of its first rank: model, version and sizes are the same on all."""
        return self.ranks[0].saved.identity


@dataclass(slots=True)
class _Gathered:
    ranks: dict[RankId, tuple[SavedRank, Taken]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def group_engines(saved: Iterable[tuple[SavedRank, Taken]]) -> list[SavedEngine]:
    """
    The engines that these files are of, in the order in which they came up.
    """
    gathered: dict[str, _Gathered] = {}
    for rank, taken in saved:
        engine = gathered.setdefault(rank.identity.engine, _Gathered())
        known = engine.ranks.get(rank.id)
        if known is None:
            engine.ranks[rank.id] = rank, taken
            continue
        older, newer = (known, (rank, taken)) if _counts(rank, taken, *known) else ((rank, taken), known)
        engine.ranks[rank.id] = newer
        engine.notes.append(_left_out(older[0], newer[0]))
    engines = [_engine(name, one) for name, one in gathered.items()]
    return sorted(engines, key=lambda engine: (min(rank.saved.created_unix for rank in engine.ranks), engine.name))


def _same_run(one: SavedRank, other: SavedRank) -> bool:
    """
    Whether two files are of one process. What a capture says of its clocks is a little different each time.
    """
    return (one.identity.host, one.identity.pid) == (other.identity.host, other.identity.pid)


def _counts(rank: SavedRank, taken: Taken, known: SavedRank, known_taken: Taken) -> bool:
    """
    Whether a file of a rank counts more than one that is known: it is of a later run, or a later copy of the same.
    """
    if not _same_run(rank, known):
        return rank.created_unix > known.created_unix
    return (rank.report.step, taken.ns or 0) > (known.report.step, known_taken.ns or 0)


def _left_out(older: SavedRank, newer: SavedRank) -> str:
    if _same_run(older, newer):
        return f"{older.file.shown} is left out: {newer.file.shown} is a newer copy of the same file"
    return f"{older.file.shown} is left out: it is of an earlier run of the rank that wrote {newer.file.shown}"


def _engine(name: str, gathered: _Gathered) -> SavedEngine:
    ids = sorted(gathered.ranks, key=lambda rank: (rank.dp_rank, rank.pp_rank, rank.tp_rank))
    labels = rank_labels(ids)
    ranks = [EngineRank(*gathered.ranks[rank], label) for rank, label in zip(ids, labels, strict=True)]
    missing = missing_ranks([rank.saved for rank in ranks])
    aligned, shifted = align_clocks(ranks)
    notes = [*gathered.notes, *shifted]
    if missing:
        notes.append(_tell_missing(missing, ranks))
    return SavedEngine(name, aligned, missing, tuple(notes))


def missing_ranks(ranks: Sequence[SavedRank]) -> tuple[RankId, ...]:
    """
    The ranks that should be there by the sizes that the others name.
    """
    there = {rank.id for rank in ranks}
    expected: dict[RankId, None] = {}
    for rank in ranks:
        identity = rank.identity
        for pp in range(min(identity.pp_size, 4096)):
            for tp in range(min(identity.tp_size, 4096)):
                expected[RankId(identity.dp_rank, pp, tp)] = None
    return tuple(rank for rank in expected if rank not in there)


def _tell_missing(missing: Sequence[RankId], ranks: Sequence[EngineRank]) -> str:
    several_tp = ranks[0].saved.identity.tp_size > 1
    names = [f"pp{rank.pp_rank} tp{rank.tp_rank}" if several_tp else f"pp{rank.pp_rank}" for rank in missing]
    there = joined(rank.label for rank in ranks)
    rest = (
        f"{there} is looked at alone, and nothing can be compared with it"
        if len(ranks) == 1
        else f"{there} are compared without {'it' if len(missing) == 1 else 'them'}"
    )
    return f"no file of {joined(names)} of {len(missing) + len(ranks)} ranks is here: {rest}"


def align_clocks(ranks: Sequence[EngineRank]) -> tuple[tuple[EngineRank, ...], list[str]]:
    """
    The ranks with their nodes' wall clocks put right by the first one's, where those differ by far too much; and a note
    on each that was.

    The same step begins on all ranks within some step times, so what the median of the differences exceeds that by is the
    clocks' difference.
    """
    first, answer, notes = ranks[0], [ranks[0]], []
    for rank in ranks[1:]:
        differs = _median_difference(first, rank)
        if differs is not None and abs(differs) > SKEW_SECONDS * 1e9:
            rank = replace(rank, shift_ns=-differs)  # noqa: PLW2901
            way = "ahead of" if differs > 0 else "behind"
            notes.append(
                f"the wall clock of {rank.label}'s node ({rank.saved.identity.host}) was {abs(differs) / 1e9:.1f} s {way} that of "
                f"{first.label}'s ({first.saved.identity.host}): times are {first.label}'s"
            )
        answer.append(rank)
    return tuple(answer), notes


def _median_difference(first: EngineRank, other: EngineRank) -> int | None:
    """
    How much later `other` begins the same steps than `first`, by the wall clocks of their nodes, in nanoseconds.
    """
    a, b = first.saved.records, other.saved.records
    _, in_a, in_b = np.intersect1d(a["step"], b["step"], assume_unique=True, return_indices=True)
    if len(in_a) == 0:
        return None
    differences = b["begin_ns"][in_b].astype(np.int64) - a["begin_ns"][in_a].astype(np.int64)
    return int(np.median(differences)) + other.unix_ns(0) - first.unix_ns(0)
