"""
Proof that ranks have parted: different words about the same step. One is enough, and it holds for the engine's life.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope_exporter.contract import Guard, Phase
from rankscope_server.domain.alignment import Aligned, Bools, differing, parted
from rankscope_server.domain.facts import RankFacts, in_one_voice, joined
from rankscope_server.domain.model import FindingKind

_BROADCAST, _SKIP = int(Guard.BROADCAST), int(Guard.SKIP)  # members of an enumeration are slow to compare

NAMED = 6
"""
Ranks that a sentence tells apart at most.
"""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """
    The first step at which ranks differ, and the last one seen so far.
    """

    kind: FindingKind
    step: int
    last_step: int
    columns: int
    """Steps at which they differ, among those that were looked at."""
    ranks: tuple[int, ...]
    """Rows of the ranks whose word is known at the first step."""
    words: tuple[str, ...]
    """What each of them said there."""
    sentence: str
    since_unix: float
    """When the second word was known to its rank, by the clock of its node."""


def assess_disagreements(aligned: Aligned, ranks: Sequence[RankFacts]) -> Iterator[Disagreement]:
    """
    The first disagreement of each kind at the steps of `aligned`.
    """
    if aligned.steps.size == 0 or len(ranks) < 2:
        return
    looks = (assess_batches, assess_masks, assess_guards, assess_widths) if parted(aligned) else (assess_widths,)
    for look in looks:
        found = look(aligned, ranks)
        if found is not None:
            yield found


def assess_batches(aligned: Aligned, ranks: Sequence[RankFacts]) -> Disagreement | None:
    """
    Ranks that were given different batches: their rolling hashes differ at the same ordinal.
    """
    # A rank whose step hook failed has left that step out of its hash ever since.
    known = aligned.reached(Phase.SCHEDULED) & _rows(ranks, [rank.steps_whole for rank in ranks])
    differs = differing(aligned.records["batch_hash"], known)
    first = _first(differs)
    if first is None:
        return None
    step = int(aligned.steps[first])
    rows = tuple(np.flatnonzero(known[:, first]).tolist())
    words = tuple(
        f"{int(r['new'])} new, {int(r['cached'])} cached, {int(r['scheduled_tokens'])} tokens"
        for _, r in _cells(aligned, first, rows)
    )
    sizes = [f"{ranks[row].label}: {size}" for row, size in zip(rows, words, strict=True)][:NAMED]
    sentence = (
        f"{joined(ranks[row].label for row in rows)} run different batches since step {step} ({'; '.join(sizes)})"
    )
    since = _since(aligned, ranks, first, rows, value="batch_hash", clock="begin_ns")
    return Disagreement(
        FindingKind.BATCH_MISMATCH, step, _last(aligned, differs), int(differs.sum()), rows, words, sentence, since
    )


def assess_masks(aligned: Aligned, ranks: Sequence[RankFacts]) -> Disagreement | None:
    """
    Requests that are masked on one rank and not on another: one of them drops a token that the other keeps.
    """
    known = aligned.mask_known
    differs = differing(aligned.records["mask_hash"], known)
    first = _first(differs)
    if first is None:
        return None
    step = int(aligned.steps[first])
    rows = tuple(np.flatnonzero(known[:, first]).tolist())
    words = tuple(f"masks {_of(int(r['masked']), int(r['requests']))}" for _, r in _cells(aligned, first, rows))
    sentence = f"at step {step} {_told(ranks, rows, words)}: requests that are masked on one rank only get wrong tokens"
    since = _since(aligned, ranks, first, rows, value="mask_hash", clock="decide_ns")
    return Disagreement(
        FindingKind.MASK_DISAGREEMENT, step, _last(aligned, differs), int(differs.sum()), rows, words, sentence, since
    )


def assess_guards(aligned: Aligned, ranks: Sequence[RankFacts]) -> Disagreement | None:
    """
    Ranks that decided differently about the sampled-token collective of a step.
    """
    known = aligned.decided
    differs = differing(aligned.records["guard"], known)
    first = _first(differs)
    if first is None:
        return None
    step = int(aligned.steps[first])
    rows = tuple(np.flatnonzero(known[:, first]).tolist())
    cells = _cells(aligned, first, rows)
    posting = [ranks[row].label for row, r in cells if r["guard"] == _BROADCAST]
    skipping = [(row, r) for row, r in cells if r["guard"] == _SKIP]
    why = ""
    if all(r["mask_known"] and r["requests"] and r["masked"] == r["requests"] for _, r in skipping):
        why = f" ({'they mask' if len(skipping) > 1 else 'it masks'} {_of(int(skipping[0][1]['masked']), int(skipping[0][1]['requests']))})"
    skipped = in_one_voice([ranks[row].label for row, _ in skipping], "skips the collective")
    sentence = f"at step {step} {in_one_voice(posting, 'broadcasts the sampled tokens')} and {skipped}{why}"
    words = tuple(_decision(r) for _, r in cells)
    since = _since(aligned, ranks, first, rows, value="guard", clock="decide_ns")
    return Disagreement(
        FindingKind.GUARD_DISAGREEMENT, step, _last(aligned, differs), int(differs.sum()), rows, words, sentence, since
    )


def assess_widths(aligned: Aligned, ranks: Sequence[RankFacts]) -> Disagreement | None:
    """
    Ranks that post the sampled-token exchange of a step differently: its columns, or how many collectives it takes.

    Only steps in which both broadcast count, and how many collectives only once both have left the step: the sender posts
    its drafts last. A rank with a hook that failed may have missed one of its own, so its count proves nothing. On V1 the
    sender's tensor and what a receiver keeps of it need not be of one shape.
    """
    if sum(rank.is_v2 for rank in ranks) < 2:
        return None
    records = aligned.records
    both = aligned.decided & (records["guard"] == _BROADCAST) & _rows(ranks, [rank.is_v2 for rank in ranks])
    width_known = both & (records["width"] > 0)
    counted = both & aligned.reached(Phase.DONE) & _rows(ranks, [rank.seen_whole for rank in ranks])
    wide, many = differing(records["width"], width_known), differing(records["posted"], counted)
    first = _first(wide | many)
    if first is None:
        return None
    step = int(aligned.steps[first])
    value, known, clock = ("width", width_known, "decide_ns") if wide[first] else ("posted", counted, "end_ns")
    rows = tuple(np.flatnonzero(known[:, first]).tolist())
    cells = _cells(aligned, first, rows)
    words = tuple(_exchange(r) for _, r in cells)
    if wide[first]:
        said = [f"posts the sampled tokens {_columns(int(r['width']))} wide" for _, r in cells]
        sentence = f"at step {step} {_told(ranks, rows, said)}: the exchange hangs, or mixes tokens up"
    else:
        said = [f"posted {_collectives(int(r['posted']))}" for _, r in cells]
        sentence = f"at step {step} {_told(ranks, rows, said)} of the sampled-token exchange: the next one pairs the wrong ones, or hangs"
    since = _since(aligned, ranks, first, rows, value=value, clock=clock)
    differs = wide | many
    return Disagreement(
        FindingKind.WIDTH_MISMATCH, step, _last(aligned, differs), int(differs.sum()), rows, words, sentence, since
    )


def _decision(record: np.void) -> str:
    """
    What a rank decided, with its mask where that is known: `skips the collective, all 6 requests masked`.
    """
    verb = "broadcasts" if record["guard"] == _BROADCAST else "skips the collective"
    masked, requests = int(record["masked"]), int(record["requests"])
    return f"{verb}, {_of(masked, requests)} masked" if record["mask_known"] and requests else verb


def _rows(ranks: Sequence[RankFacts], which: Sequence[bool]) -> Bools:
    """
    A mask over (ranks, steps) that holds at every step of some ranks.
    """
    return np.asarray(which, bool).reshape(len(ranks), 1)


def _exchange(record: np.void) -> str:
    """
    How a rank posts the exchange: `posts 3 collectives, 4 columns`.
    """
    width = int(record["width"])
    return f"posts {_collectives(int(record['posted']))}, {_columns(width) if width else 'of unknown width'}"


def _columns(width: int) -> str:
    return "1 column" if width == 1 else f"{width} columns"


def _collectives(count: int) -> str:
    return "1 collective" if count == 1 else f"{count} collectives"


def _cells(aligned: Aligned, column: int, rows: Sequence[int]) -> list[tuple[int, np.void]]:
    return [(row, aligned.records[row, column]) for row in rows]


def _first(differs: Bools) -> int | None:
    return int(differs.argmax()) if differs.any() else None


def _last(aligned: Aligned, differs: Bools) -> int:
    return int(aligned.steps[np.flatnonzero(differs)[-1]])


def _since(
    aligned: Aligned, ranks: Sequence[RankFacts], column: int, rows: Sequence[int], *, value: str, clock: str
) -> float:
    """
    When two different words stood: the moment of the later one of the two that came first, each of its kind.
    """
    earliest: dict[int, float] = {}
    for row in rows:
        record = aligned.records[row, column]
        at = ranks[row].clock.unix_of(int(record[clock]))
        word = int(record[value])
        earliest[word] = min(at, earliest.get(word, at))
    return sorted(earliest.values())[1]


def _told(ranks: Sequence[RankFacts], rows: Sequence[int], said: Sequence[str]) -> str:
    """
    What ranks said, in a sentence; those that say the same speak with one voice.
    """
    voices: dict[str, list[str]] = {}
    for row, what in zip(rows, said, strict=True):
        voices.setdefault(what, []).append(ranks[row].label)
    told = list(voices.items())
    if len(rows) > NAMED:
        told = sorted(told, key=lambda voice: len(voice[1]))[:NAMED]  # the rarest
    elif len(told) == 1:  # ranks that differ, as far as the words go, say the same: one by one
        told = [(what, [ranks[row].label]) for row, what in zip(rows, said, strict=True)]
    return _listed([in_one_voice(labels, what) for what, labels in told])


def _of(part: int, whole: int) -> str:
    if whole == 1 and part == 1:
        return "its only request"
    return f"all {whole} requests" if part == whole else f"{part or 'none'} of {whole} requests"


def _listed(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
