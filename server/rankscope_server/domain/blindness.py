"""
What should be seen of an engine and is not.
"""

from collections.abc import Iterator, Mapping, Sequence

from rankscope_exporter.contract import MitigationState, Phase, RankLife, RankReport
from rankscope_server.domain.assessed import Assessed, values_of
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, RankFacts, joined, plain_url, seconds
from rankscope_server.domain.model import Evidence, FindingKind, Severity
from rankscope_server.domain.sight import assess_sight

GRACE_SECONDS = 20.0
"""
Ranks of an engine come up one after the other: none is missing before this.
"""

REASONS_TOLD = 8
"""
Reasons that the sentence holds at most; the evidence has all.
"""

Reason = tuple[str, Sequence[RankFacts]]
"""
What is not seen, and of which ranks; of none where no rank is known that it could be said of.
"""


def find_unseen(engine: EngineFacts, sound: Mapping[str, RankReport]) -> dict[RankFacts, list[str]]:
    """
    Ranks of which something is not seen, each with the reasons. `sound` are reports that are known to give none.
    """
    return {
        rank: texts
        for rank in engine.ranks
        if (texts := [*(_unseen(rank) if sound.get(rank.report.key) is not rank.report else ()), *_lengths(rank)])
    }


def assess_blind(engine: EngineFacts, unseen: Mapping[RankFacts, Sequence[str]], now: Moment) -> Iterator[Assessed]:
    """
    What should be seen and is not, all in one finding: the first reason is the sentence, the others follow it.
    """
    if engine.ended:
        return
    reasons: list[Reason] = [*_out_of_reach(engine, now), *_missing(engine, now)]
    for rank, texts in unseen.items():
        reasons += [(text, (rank,)) for text in texts]
    if not reasons:
        return
    words: dict[RankFacts, list[str]] = {}
    for text, of in reasons:
        for rank in of:
            words.setdefault(rank, []).append(text)
    ranks = tuple(words) if all(of for _, of in reasons) else engine.ranks
    evidence = Evidence(values_of(tuple(words), map("; ".join, words.values())))
    sentence = _sentence(list(dict.fromkeys(text for text, _ in reasons)))
    yield Assessed(FindingKind.BLIND, -1, Severity.WARNING, sentence, None, ranks, now.unix, evidence)


def _sentence(texts: Sequence[str]) -> str:
    more = len(texts) - REASONS_TOLD
    return "; ".join([*texts[:REASONS_TOLD], *([f"and {more} more such reasons"] if more > 0 else [])])


def _out_of_reach(engine: EngineFacts, now: Moment) -> Iterator[Reason]:
    for exporter in engine.exporters:
        if exporter.out_of_reach(now):
            ranks = [rank for rank in engine.ranks if rank.exporter == exporter.url]
            age = exporter.age_seconds(now)
            ago = "never answered" if age is None else f"last answered {seconds(age)} ago"
            names = joined(rank.label for rank in ranks) or "no rank"
            yield f"the exporter of {names} ({plain_url(exporter.url)}) {ago}: {exporter.error or 'no answer'}", ranks


def _missing(engine: EngineFacts, now: Moment) -> Iterator[Reason]:
    if engine.missing and all(now.monotonic - rank.first_seen > GRACE_SECONDS for rank in engine.ranks):
        yield (
            f"{engine.missing} of the engine's ranks are not seen by any exporter: name the exporter of their node in the deployment",
            (),
        )


def _unseen(rank: RankFacts) -> Iterator[str]:
    identity = rank.report.identity
    yield from assess_sight(rank)
    if rank.report.life is RankLife.UNKNOWN:
        yield (
            f"whether {rank.label} lives is unknown: let its exporter share vLLM's process namespace "
            '(Kubernetes: shareProcessNamespace: true; Compose: pid: "service:vllm")'
        )
    if not rank.at_risk:
        return  # nothing of what is watched here can happen
    if identity.runner not in ("V1", "V2"):
        yield f"{rank.label} runs a model runner that Rankscope does not know ({identity.runner_class}): run rankscope-exporter doctor beside vLLM"
    elif rank.trim is MitigationState.UNKNOWN_CODE:
        yield f"{rank.label} runs code that the trim fix does not know: {rank.trim_reason or 'no reason given'}"


def _lengths(rank: RankFacts) -> Iterator[str]:
    head = rank.history.head
    if head is None or head.lengths or not rank.at_risk or rank.is_v2 or rank.lost_hooks:
        return  # on V2 early releases keep none
    records = rank.history.tail(8)
    judged = records[(records["phase"] >= Phase.STATE_UPDATED) & (records["cached"] > 0)]
    if len(judged) and not bool((judged["lengths"] > 0).any()):
        yield f"{rank.label} reports steps without request-state lengths"
