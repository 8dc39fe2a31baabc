"""
Replayed engines as a trace that Perfetto opens.
"""

from collections.abc import Sequence

from rankscope_server.incidents.perfetto import TraceEngine, TraceRank, build_trace
from rankscope_server.replay.playing import Played
from rankscope_server.replay.timeline import Timeline
from rankscope_server.replay.verdict import Verdict


def trace_replayed(engines: Sequence[tuple[Played, Verdict]]) -> bytes:
    """
    The trace as JSON, with a mark for each finding.
    """
    return build_trace([_trace(played, verdict) for played, verdict in engines])


def _trace(played: Played, verdict: Verdict) -> TraceEngine:
    ranks = tuple(
        TraceRank(
            rank.label,
            rank.saved.id.dp_rank,
            Timeline(rank.saved.records, rank.saved.created_ns).records,
            facts.clock,
        )
        for rank, facts in zip(played.engine.ranks, played.facts.ranks, strict=True)
    )
    marks = tuple(
        (found.finding.since_unix, f"{found.finding.kind.value}: {found.finding.sentence}") for found in verdict.found
    )
    return TraceEngine(played.engine.name, ranks, marks)
