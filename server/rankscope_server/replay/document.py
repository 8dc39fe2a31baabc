"""
A replay as JSON, for scripts.
"""

from collections.abc import Sequence
from typing import Any

from rankscope_server import __version__
from rankscope_server.domain.model import RankId
from rankscope_server.replay.engines import EngineRank
from rankscope_server.replay.playing import Found, Played
from rankscope_server.replay.steps import StepRow
from rankscope_server.replay.verdict import Foreseen, Verdict

SCHEMA_VERSION = 1
"""
Raised when a name changes its meaning or goes; new names may come at any time.
"""


def document(
    engines: Sequence[tuple[Played, Verdict]],
    problems: Sequence[str],
    steps: Sequence[tuple[int, Sequence[StepRow]]] = (),
) -> dict[str, Any]:
    """
    Everything that a replay came to. Times are wall-clock seconds since 1970, what is not known is null.

    `steps` has the step that was asked for, for each engine, or is empty if none was.
    """
    answer = [engine_document(played, verdict) for played, verdict in engines]
    for engine, (played, _), (step, rows) in zip(answer, engines, steps or [(0, ())] * len(answer), strict=True):
        if steps:
            engine["step"] = step_document(step, rows, [rank.label for rank in played.engine.ranks])
    return {
        "schema_version": SCHEMA_VERSION,
        "rankscope_version": __version__,
        "engines": answer,
        "problems": list(problems),
    }


def engine_document(played: Played, verdict: Verdict) -> dict[str, Any]:
    """
    One engine.
    """
    identity = played.engine.identity
    histories = [rank.history for rank in played.facts.ranks if rank.history.last]
    return {
        "engine": identity.engine,
        "model": identity.model,
        "vllm_version": identity.vllm_version,
        "runner": identity.runner,
        "ranks": [_rank_document(rank) for rank in played.engine.ranks],
        "missing_ranks": [_id(rank) for rank in played.engine.missing],
        "first_step": min((history.first for history in histories), default=None),
        "last_step": max((history.last for history in histories), default=None),
        "begun_unix": played.begun_unix,
        "ended_unix": played.ended.unix,
        "state": verdict.state.label,
        "verdict": verdict.sentence,
        "first_drift_unix": verdict.first_drift_unix,
        "findings": [_found_document(found, verdict.first_drift_unix) for found in verdict.found],
        "forecasts": [_foreseen_document(one) for one in verdict.foreseen],
        "notes": list(verdict.notes),
    }


def _id(rank: RankId) -> dict[str, int]:
    return {"dp_rank": rank.dp_rank, "pp_rank": rank.pp_rank, "tp_rank": rank.tp_rank}


def _rank_document(rank: EngineRank) -> dict[str, Any]:
    saved, taken = rank.saved, rank.taken
    return {
        **_id(saved.id),
        "label": rank.label,
        "file": saved.file.shown,
        "host": saved.identity.host,
        "pid": saved.identity.pid,
        "taken_unix": None if taken.ns is None else rank.unix_ns(taken.ns) / 1e9,
        "life": None if taken.life is None else taken.life.value,
        "records": len(saved.records),
        "last_step": saved.report.step,
    }


def _found_document(found: Found, first_drift_unix: float | None) -> dict[str, Any]:
    finding = found.finding
    return {
        "kind": finding.kind.value,
        "severity": finding.severity.value,
        "sentence": finding.sentence,
        "step": finding.step,
        "ranks": [_id(rank) for rank in finding.ranks],
        "since_unix": finding.since_unix,
        "found_unix": found.found_unix,
        "over_unix": found.over_unix,
        "seconds_after_first_drift": None if first_drift_unix is None else finding.since_unix - first_drift_unix,
        "evidence": {
            "values": [{**_id(v.rank), "label": v.label, "value": v.value} for v in finding.evidence.values],
            "requests": list(finding.evidence.requests),
        },
    }


def _foreseen_document(foreseen: Foreseen) -> dict[str, Any]:
    forecast = foreseen.forecast
    return {
        "at_unix": foreseen.at_unix,
        "outlook": forecast.outlook.value,
        "earliest_seconds": forecast.earliest_seconds,
        "latest_seconds": forecast.latest_seconds,
        "rank": forecast.rank,
        "reason": forecast.reason,
        "parted_after_seconds": foreseen.parted_after_seconds,
    }


def step_document(step: int, rows: Sequence[StepRow], labels: Sequence[str]) -> dict[str, Any]:
    """
    One step on all ranks: `null` where no rank has a record of it.
    """
    facts = {row.name: {"differs": row.differs, "ranks": dict(zip(labels, row.values, strict=True))} for row in rows}
    return {"step": step, "facts": facts or None}
