"""
What is wrong with an engine: `assess` looks at what was polled and says so, with evidence.

Nothing is called wrong that good health can look like: ranks that are a few steps apart, records that are not there
yet, an idle engine, a first step that compiles for half a minute.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope_exporter.contract import ControlOutcome, Guard, MitigationState, Phase, RankLife
from rankscope_server.domain.acts import note_acts
from rankscope_server.domain.alignment import Aligned, align, newest_step, settled_step
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.disagreements import (
    Disagreement,
    assess_batches,
    assess_guards,
    assess_masks,
    assess_widths,
)
from rankscope_server.domain.drift import assess_device_drift, assess_drift, drift_over, drift_sentence
from rankscope_server.domain.facts import EngineFacts, RankFacts, joined, seconds
from rankscope_server.domain.fix import acting_on
from rankscope_server.domain.model import ActedMark, Finding, FindingKind, Severity
from rankscope_server.domain.sight import assess_sight
from rankscope_server.domain.words import failed_in

WEDGE_SECONDS = 3.0
"""
Ranks that have parted and do not move for this long, or for ten usual steps, are wedged.
"""

STALL_SECONDS = 10.0
"""
Ranks that agree and do not move for this long, or for fifty usual steps, are stalled.
"""

STALL_CRITICAL = 6.0
"""
A stall of so many times its limit is critical.
"""

WARM_UP_STEPS, WARM_UP_SECONDS = 8, 90.0
"""
The first steps of an engine may compile: their limit is never below this.
"""

SETTLE_SECONDS = 2.5
"""
What two answers of an exporter a second apart must both show before it counts: ranks are not read at one moment.
"""

GRACE_SECONDS = 20.0
"""
Ranks of an engine come up one after the other: none is missing before this.
"""

MAX_WINDOW = 1024
"""
Steps that are compared at most in one go; a rank that lags further behind has lost what is before.
"""

CLOSED_KEPT = 8

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
    A finding as it shows itself now; `settle` gives it its life.
    """

    kind: FindingKind
    group: int
    severity: Severity
    sentence: str
    step: int | None
    ranks: tuple[RankFacts, ...]
    since_unix: float


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """
    What is remembered of an engine between two looks at it.
    """

    settled: Mapping[int, int] = field(default_factory=dict)
    """Per dp rank: the step up to which everything was compared."""
    findings: Mapping[tuple[FindingKind, int], Finding] = field(default_factory=dict)
    closed: tuple[Finding, ...] = ()
    """Those that were and are no more, newest first, a few."""
    last_differing: Mapping[tuple[FindingKind, int], int] = field(default_factory=dict)
    """The last step at which ranks were seen to differ."""
    acted: tuple[ActedMark, ...] = ()
    """When toggles of the trim fix took effect, oldest first, a few."""

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Open ones first, the worst first; then the closed ones."""
        shown = (self._with_last_step(key, finding) for key, finding in self.findings.items())
        worst = sorted(shown, key=lambda finding: (_RANKING[finding.kind], finding.since_unix))
        return (*worst, *self.closed)

    def _with_last_step(self, key: tuple[FindingKind, int], finding: Finding) -> Finding:
        last = self.last_differing.get(key, 0)
        if finding.step is None or last <= finding.step:
            return finding
        return dataclasses.replace(finding, sentence=f"{finding.sentence} (again since, last at step {last})")

    def has(self, *kinds: FindingKind) -> bool:
        """
        Whether a finding of one of the kinds is open.
        """
        return any(kind in kinds for kind, _ in self.findings)


_RANKING = {
    FindingKind.WEDGED: 0,
    FindingKind.RANK_LOST: 1,
    FindingKind.GUARD_DISAGREEMENT: 2,
    FindingKind.WIDTH_MISMATCH: 3,
    FindingKind.BATCH_MISMATCH: 4,
    FindingKind.MASK_DISAGREEMENT: 5,
    FindingKind.MITIGATION_MIXED: 6,
    FindingKind.STALLED: 7,
    FindingKind.DRIFT: 8,
    FindingKind.BLIND: 9,
}


def assess(engine: EngineFacts, memory: EngineMemory, now: Moment) -> EngineMemory:
    """
    Look at an engine: the memory that follows, with every finding that holds now.
    """
    settled = dict(memory.settled)
    last_differing = dict(memory.last_differing)
    assessed: list[Assessed] = []
    for group in engine.groups:
        dp = group[0].id.dp_rank
        reach = reach_of(group)
        before = max(settled.get(dp, 0), newest_step([rank.history for rank in group]) - MAX_WINDOW)
        # Some settled steps are looked at once more: drift needs neighbours, and their drift is compared, not their words.
        aligned = align([rank.history for rank in group], before - reach, newest_step([rank.history for rank in group]))
        for found in _disagreements(aligned, group):
            key = (found.kind, dp)
            last_differing[key] = max(found.last_step, last_differing.get(key, 0))
            assessed.append(_of_disagreement(found, group, dp))
        assessed += _assess_drift(engine, group, aligned, memory, now)
        fresh = Aligned(aligned.steps[aligned.steps > before], aligned.records[:, aligned.steps > before])
        settled[dp] = settled_step(fresh, before)
        kinds = {kind for kind, of in memory.findings if of == dp} | {
            found.kind for found in assessed if found.group == dp
        }
        assessed += _assess_motion(group, kinds, memory, now)
        assessed += _assess_life(engine, group, now)
        assessed += _assess_mitigation(group, aligned, now)
    assessed += assess_blind(engine, now)
    acted = note_acts(engine, memory.acted)
    memory = dataclasses.replace(memory, settled=settled, last_differing=last_differing, acted=acted)
    return settle(memory, assessed, now)


def reach_of(group: Sequence[RankFacts]) -> int:
    """
    How many batches of an engine can be in flight, at least 1: a request comes round after as many steps.
    """
    return max(1, group[0].report.identity.pp_size)


def settle(memory: EngineMemory, assessed: Sequence[Assessed], now: Moment) -> EngineMemory:
    """
    Give findings their life: new ones open, known ones keep their first step and time, those that ended close.
    """
    current: dict[tuple[FindingKind, int], Finding] = {}
    for one in assessed:
        key = (one.kind, one.group)
        ranks = tuple(rank.id for rank in one.ranks)
        known = memory.findings.get(key)
        if known is None:
            current[key] = Finding(
                one.kind, one.severity, one.sentence, one.step, ranks, one.since_unix, open=True, found_unix=now.unix
            )
        elif one.kind not in STICKY:
            current[key] = dataclasses.replace(known, severity=one.severity, sentence=one.sentence, ranks=ranks)
    closed = list(memory.closed)
    for key, known in memory.findings.items():
        if key in current:
            continue
        if known.kind in STICKY:
            current[key] = known
        else:
            closed.insert(0, dataclasses.replace(known, open=False))
    return dataclasses.replace(memory, findings=current, closed=tuple(closed[:CLOSED_KEPT]))


def _disagreements(aligned: Aligned, group: Sequence[RankFacts]) -> Iterator[Disagreement]:
    if aligned.steps.size == 0 or len(group) < 2:
        return
    for look in (assess_batches, assess_masks, assess_guards, assess_widths):
        found = look(aligned, group)
        if found is not None:
            yield found


def _of_disagreement(found: Disagreement, group: Sequence[RankFacts], dp: int) -> Assessed:
    ranks = tuple(group[row] for row in found.ranks)
    return Assessed(found.kind, dp, Severity.CRITICAL, found.sentence, found.step, ranks, found.since_unix)


def _assess_drift(
    engine: EngineFacts, group: Sequence[RankFacts], aligned: Aligned, memory: EngineMemory, now: Moment
) -> Iterator[Assessed]:
    dp, reach = group[0].id.dp_rank, reach_of(group)
    known = memory.findings.get((FindingKind.DRIFT, dp))
    if engine.idle or aligned.steps.size == 0:
        return  # no request is left that could drift
    found = {one.row: one for one in (*assess_drift(aligned, group, reach), *assess_device_drift(group, now))}
    rows = [row for row, rank in enumerate(group) if row in found or (known is not None and rank.id in known.ranks)]
    rows = [row for row in rows if not drift_over(group[row], reach)]
    if not rows:
        return
    first = min((found[row] for row in rows if row in found), key=lambda one: one.step, default=None)
    step = (
        known.step
        if known is not None and known.step is not None
        else first.step
        if first is not None
        else group[rows[0]].history.last
    )
    since = first.since_unix if first is not None else now.unix
    sentence = drift_sentence(group, rows, step, reach)
    yield Assessed(FindingKind.DRIFT, dp, Severity.WARNING, sentence, step, tuple(group[row] for row in rows), since)


def usual_step_seconds(rank: RankFacts) -> float:
    """
    Median duration of a rank's last steps; 0 where none is known.
    """
    records = rank.history.tail(64)
    done = records[records["phase"] == Phase.DONE]
    if len(done) == 0:
        return 0.0
    return float(np.median((done["end_ns"] - done["begin_ns"]).astype(np.int64))) / 1e9


def _limit(group: Sequence[RankFacts], least: float, steps: float) -> float:
    usual = max(usual_step_seconds(rank) for rank in group)
    warming = newest_step([rank.history for rank in group]) <= WARM_UP_STEPS
    return max(least, steps * min(usual, 6.0), WARM_UP_SECONDS if warming else 0.0)


def _assess_motion(
    group: Sequence[RankFacts], kinds: set[FindingKind], memory: EngineMemory, now: Moment
) -> Iterator[Assessed]:
    """
    Ranks that do not move with a step in flight: wedged if they have parted, stalled if nothing says so.
    """
    dp = group[0].id.dp_rank
    parted = bool(kinds & set(STICKY))
    stuck = [rank for rank in group if rank.in_flight]
    if not stuck or any(rank.report.life is RankLife.STOPPED for rank in group):
        return
    frozen = min(rank.quiet_seconds for rank in group)
    step = min(rank.history.last for rank in stuck)
    since = now.unix - frozen
    if parted:
        # A wedge that was seen before the last process ended is not undone by it.
        limit = WEDGE_SECONDS if FindingKind.GUARD_DISAGREEMENT in kinds else _limit(group, WEDGE_SECONDS, 10)
        if frozen >= limit or ((FindingKind.WEDGED, dp) in memory.findings and frozen > 1.0):
            yield Assessed(
                FindingKind.WEDGED, dp, Severity.CRITICAL, _wedge_sentence(group, frozen), step, tuple(stuck), since
            )
        return
    if any(rank.report.life is RankLife.GONE or rank.failure is not None for rank in group):
        return  # that a process is gone, or its step failed, says it better
    limit = _limit(group, STALL_SECONDS, 50)
    if frozen >= limit:
        severity = Severity.CRITICAL if frozen >= STALL_CRITICAL * limit else Severity.WARNING
        sentence = f"no rank has moved for {seconds(frozen)} with step {step} in flight on {joined(r.label for r in stuck)}; no disagreement is known"
        yield Assessed(FindingKind.STALLED, dp, severity, sentence, step, tuple(stuck), since)


def _wedge_sentence(group: Sequence[RankFacts], frozen: float) -> str:
    senders = [rank for rank in group if rank.phase is Phase.DECIDED and _newest_guard(rank) == Guard.BROADCAST]
    others = [rank for rank in group if rank not in senders]
    parts = []
    if senders:
        parts.append(
            f"{joined(r.label for r in senders)} posted the broadcast of step {senders[0].history.last} and never came back"
        )
    for rank in others:
        where = "in" if rank.in_flight else "after"
        parts.append(f"{rank.label} is {where} step {rank.history.last}")
    return f"{'; '.join(parts)}: no rank has moved for {seconds(frozen)}, and none will until the engine is restarted"


def _newest_guard(rank: RankFacts) -> int:
    newest = rank.history.newest()
    return int(newest["guard"]) if newest is not None else int(Guard.NONE)


def _assess_life(engine: EngineFacts, group: Sequence[RankFacts], now: Moment) -> Iterator[Assessed]:
    """
    Ranks that take no further step while their peers wait: gone, stopped, or with a step that an error of vLLM ended.
    """
    if engine.replaced:
        return
    gone = [rank for rank in group if rank.report.life is RankLife.GONE]
    stopped = [rank for rank in group if rank.report.life is RankLife.STOPPED]
    failed = [rank for rank in group if rank.failure is not None]
    lifeless = [
        rank
        for rank in (*gone, *stopped)
        if now.monotonic - rank.life_since >= SETTLE_SECONDS or rank.life_since <= rank.first_seen
    ]
    lost = list(dict.fromkeys((*failed, *lifeless)))  # whose step failed first: that is the cause
    if not lost:
        return
    if len(gone) == len(group):
        failures = "".join(f"{_loss(rank, gone)}; " for rank in failed)
        sentence = f"{failures}every process of the engine is gone; the last step was {newest_step([rank.history for rank in group])}: start vLLM again"
    else:
        sentence = f"{joined(_loss(rank, gone) for rank in lost)}{_waiting(group, lost)}"
    since = min(
        [now.unix_of(rank.life_since) for rank in lifeless if rank not in failed]
        + [_failed_unix(rank, now) for rank in failed]
    )
    step = min((rank.history.last for rank in lost if rank.history.last), default=None)
    yield Assessed(FindingKind.RANK_LOST, group[0].id.dp_rank, Severity.CRITICAL, sentence, step, tuple(lost), since)


def _loss(rank: RankFacts, gone: Sequence[RankFacts]) -> str:
    how = "is gone" if rank in gone else "is stopped by a signal"
    if rank.failure is not None:
        ended = f", and {how} (pid {rank.report.identity.pid})" if rank in gone else ""
        return f"{rank.label} {failed_in(rank.failure)}{ended}"
    return f"{rank.label} {how} (pid {rank.report.identity.pid}) at step {rank.history.last}"


def _waiting(group: Sequence[RankFacts], lost: Sequence[RankFacts]) -> str:
    """
    Who waits for the ranks that are lost, as the end of a sentence; empty if nobody does.
    """
    waiting = [rank.label for rank in group if rank.running and rank not in lost]
    if not waiting:
        return ""
    if all(rank.failure is not None for rank in lost):
        return f"; {'its' if len(lost) == 1 else 'their'} peers wait"
    return f"; {joined(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for it"


def _failed_unix(rank: RankFacts, now: Moment) -> float:
    """
    When the step that failed was last written to: the error came after that.
    """
    newest = rank.history.newest()
    if newest is None:
        return now.unix
    return rank.clock.unix_of(max(int(newest["begin_ns"]), int(newest["decide_ns"])))


def _assess_mitigation(group: Sequence[RankFacts], aligned: Aligned, now: Moment) -> Iterator[Assessed]:
    """
    Ranks of which some have the trim fix and some do not, at the same step or for longer than a toggle takes.
    """
    live = [rank for rank in group if rank.report.life is not RankLife.GONE]
    on = [rank for rank in live if rank.trim is MitigationState.APPLIED]
    off = [rank for rank in live if rank.trim in (MitigationState.AVAILABLE, MitigationState.UNKNOWN_CODE)]
    acting = any(acting_on(rank) for rank in live)
    if (not on or not off) and not acting:
        return
    both = np.flatnonzero(aligned.reached(Phase.STATE_UPDATED).all(axis=0)) if len(group) > 1 else np.zeros(0, int)
    step: int | None = None
    if both.size:
        states = aligned.records["mitigation"][:, both[-1]]
        if states.min() != states.max() and MitigationState.APPLIED in states:
            step = int(aligned.steps[both[-1]])
            on = [rank for rank, state in zip(group, states, strict=True) if state == MitigationState.APPLIED]
            off = [rank for rank in group if rank not in on]
    if not on or not off or (acting and step is None):
        return
    failed = [rank for rank in off if rank.report.control.outcome in (ControlOutcome.REFUSED, ControlOutcome.FAILED)]
    why = (
        f" ({joined(r.label for r in failed)} could not act: {failed[0].trim_reason or 'no reason given'})"
        if failed
        else ""
    )
    sentence = f"the trim fix is on at {joined(r.label for r in on)} and not at {joined(r.label for r in off)}{why}: turn it on or off again for all ranks"
    yield Assessed(
        FindingKind.MITIGATION_MIXED, group[0].id.dp_rank, Severity.CRITICAL, sentence, step, (*on, *off), now.unix
    )


def assess_blind(engine: EngineFacts, now: Moment) -> Iterator[Assessed]:
    """
    What should be seen and is not, all in one finding: the first reason is the sentence, the others follow it.
    """
    if engine.ended:
        return
    reasons: list[tuple[str, tuple[RankFacts, ...]]] = []
    for exporter in engine.exporters:
        if exporter.out_of_reach(now):
            ranks = tuple(rank for rank in engine.ranks if rank.exporter == exporter.url)
            age = exporter.age_seconds(now)
            ago = "never answered" if age is None else f"last answered {seconds(age)} ago"
            reasons.append(
                (
                    f"the exporter of {joined(r.label for r in ranks) or 'no rank'} {ago}: {exporter.error or 'no answer'}",
                    ranks,
                )
            )
    if engine.missing and all(now.monotonic - rank.first_seen > GRACE_SECONDS for rank in engine.ranks):
        text = f"{engine.missing} of the engine's ranks are not seen by any exporter: name the exporter of their node in the deployment"
        reasons.append((text, ()))
    for rank in engine.ranks:
        reasons += [(text, (rank,)) for text in _unseen(rank)]
    if reasons:
        seen: dict[str, None] = dict.fromkeys(text for text, _ in reasons)
        ranks = (
            tuple(dict.fromkeys(rank for _, of in reasons for rank in of))
            if all(of for _, of in reasons)
            else engine.ranks
        )
        yield Assessed(FindingKind.BLIND, -1, Severity.WARNING, "; ".join(seen), None, ranks, now.unix)


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
    if rank.is_v2:
        return  # its lengths on the host cannot drift, and early releases keep none
    records = rank.history.tail(8)
    judged = records[(records["phase"] >= Phase.STATE_UPDATED) & (records["cached"] > 0)]
    if not rank.lost_hooks and len(judged) and not bool((judged["lengths"] > 0).any()):
        yield f"{rank.label} reports steps without request-state lengths"
