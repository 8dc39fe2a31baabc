"""
What is wrong with an engine: `assess` looks at what was polled and says so, with evidence.

Nothing is called wrong that good health can look like: ranks that are a few steps apart, records that are not there
yet, an idle engine, a first step that compiles for half a minute.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from rankscope_exporter.contract import RankReport
from rankscope_server.domain.acts import note_acts
from rankscope_server.domain.alignment import Aligned, align_blocks, newest_step
from rankscope_server.domain.assessed import STICKY, Assessed, values_of
from rankscope_server.domain.blindness import assess_blind, find_unseen
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.disagreements import Disagreement, assess_disagreements
from rankscope_server.domain.drift import Drifting, assess_drift, lasting_drifts
from rankscope_server.domain.facts import EngineFacts, RankFacts, of_one_run, reach_of
from rankscope_server.domain.life import assess_life
from rankscope_server.domain.mixed import assess_mitigation, reports_differ
from rankscope_server.domain.model import ActedMark, Evidence, Finding, FindingKind, Severity
from rankscope_server.domain.motion import assess_motion, still_parted
from rankscope_server.domain.requests import masked_requests

__all__ = ["STICKY", "EngineMemory", "assess", "settle"]

CLOSED_KEPT = 8


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """
    What is remembered of an engine between two looks at it.
    """

    seen: Mapping[str, int] = field(default_factory=dict)
    """Per process of a rank (`RankReport.key`): the revision of its history up to which everything was compared."""
    sound: Mapping[str, RankReport] = field(default_factory=dict)
    """Per process of a rank: its last report, if it leaves nothing unseen. The same one need not be gone through again."""
    findings: Mapping[tuple[FindingKind, int], Finding] = field(default_factory=dict)
    closed: tuple[Finding, ...] = ()
    """Those that were and are no more, newest first, a few."""
    last_differing: Mapping[tuple[FindingKind, int], int] = field(default_factory=dict)
    """The last step at which ranks were seen to differ."""
    mixed_since: Mapping[int, float] = field(default_factory=dict)
    """Per dp rank: monotonic second since which reports differ about the trim fix."""
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
    groups = [_together(group, memory.seen) for group in engine.groups]
    memory = _of_this_run(memory, groups)
    last_differing = dict(memory.last_differing)
    mixed_since: dict[int, float] = {}
    assessed: list[Assessed] = []
    for group in groups:
        dp = group[0].id.dp_rank
        lasting: list[Drifting] = []
        for aligned in _changed(group, memory.seen):
            for found in assess_disagreements(aligned, group):
                key = (found.kind, dp)
                last_differing[key] = max(found.last_step, last_differing.get(key, 0))
                if all(one.key != key for one in assessed):  # the first step of all blocks counts
                    assessed.append(_of_disagreement(found, group, dp))
            lasting += lasting_drifts(aligned, group, reach_of(group))
        assessed += assess_drift(engine, group, lasting, memory.findings.get((FindingKind.DRIFT, dp)), now)
        kinds = frozenset(kind for kind, of in (*memory.findings, *(one.key for one in assessed)) if of == dp)
        parted = still_parted(kinds, last_differing.get((FindingKind.MASK_DISAGREEMENT, dp), 0), group)
        assessed += assess_motion(engine, group, parted, memory.findings, now)
        assessed += assess_life(engine, group, now)
        if reports_differ(group):
            mixed_since[dp] = memory.mixed_since.get(dp, now.monotonic)
        mixed = memory.findings.get((FindingKind.MITIGATION_MIXED, dp))
        assessed += assess_mitigation(group, mixed, mixed_since.get(dp, inf), now)
    unseen = find_unseen(engine, memory.sound)
    assessed += assess_blind(engine, unseen, now)
    sound = {rank.report.key: rank.report for rank in engine.ranks if rank not in unseen}
    seen = {rank.report.key: rank.history.revision for group in groups for rank in group}
    acted = note_acts(engine, memory.acted)
    memory = dataclasses.replace(
        memory, seen=seen, sound=sound, mixed_since=mixed_since, last_differing=last_differing, acted=acted
    )
    return settle(memory, assessed, engine, now)


def _together(group: Sequence[RankFacts], seen: Mapping[str, int]) -> Sequence[RankFacts]:
    """
    The ranks of a group that belong together, as those do that were compared before.
    """
    return group if all(rank.report.key in seen for rank in group) else of_one_run(group)


def _of_this_run(memory: EngineMemory, groups: Sequence[Sequence[RankFacts]]) -> EngineMemory:
    """
    What still holds of `memory`: nothing but its past if every process has been replaced under the engine's old name.
    """
    if not memory.seen or any(rank.report.key in memory.seen for group in groups for rank in group):
        return memory
    closed = (*(dataclasses.replace(finding, open=False) for finding in memory.findings.values()), *memory.closed)
    return EngineMemory(closed=closed[:CLOSED_KEPT])


def settle(memory: EngineMemory, assessed: Sequence[Assessed], engine: EngineFacts, now: Moment) -> EngineMemory:
    """
    Give findings their life: new ones open, known ones keep their first step and time, those that ended close.
    """
    if not assessed and not memory.findings:
        return memory
    current: dict[tuple[FindingKind, int], Finding] = {}
    for one in assessed:
        ranks = tuple(rank.id for rank in one.ranks)
        known = memory.findings.get(one.key)
        if known is None:
            current[one.key] = Finding(
                one.kind,
                one.severity,
                one.sentence,
                one.step,
                ranks,
                one.since_unix,
                open=True,
                found_unix=now.unix,
                evidence=one.evidence,
            )
        elif one.kind not in STICKY:
            current[one.key] = dataclasses.replace(
                known, severity=one.severity, sentence=one.sentence, ranks=ranks, evidence=one.evidence
            )
    closed = list(memory.closed)
    for key, known in memory.findings.items():
        if key in current:
            continue
        if known.kind in STICKY:
            current[key] = known
        else:
            closed.insert(0, dataclasses.replace(known, open=False))
    for key, finding in current.items():
        if finding.kind in _ABOUT_MASKS and not finding.evidence.requests:
            current[key] = _with_requests(finding, engine)
    return dataclasses.replace(memory, findings=current, closed=tuple(closed[:CLOSED_KEPT]))


_ABOUT_MASKS = (FindingKind.GUARD_DISAGREEMENT, FindingKind.MASK_DISAGREEMENT)


def _with_requests(finding: Finding, engine: EngineFacts) -> Finding:
    """
    A disagreement about masks with the requests that were masked, which come to be known a while after it.
    """
    concerned = frozenset(finding.ranks)
    ranks = [rank for rank in engine.ranks if rank.id in concerned]
    requests = masked_requests(ranks, finding.step, reach_of(ranks)) if ranks and finding.step else ()
    if not requests:
        return finding
    return dataclasses.replace(finding, evidence=dataclasses.replace(finding.evidence, requests=requests))


def _changed(group: Sequence[RankFacts], seen: Mapping[str, int]) -> Iterator[Aligned]:
    """
    The steps of which a rank brought something since the last look, with the few before them: drift needs neighbours.
    """
    histories = [rank.history for rank in group]
    revisions = [seen.get(rank.report.key, 0) for rank in group]
    changes = [
        history.changed_since(revision)
        for history, revision in zip(histories, revisions, strict=True)
        if history.revision != revision
    ]
    if changes:
        yield from align_blocks(histories, min(changes), newest_step(histories), reach_of(group))


def _of_disagreement(found: Disagreement, group: Sequence[RankFacts], dp: int) -> Assessed:
    ranks = tuple(group[row] for row in found.ranks)
    evidence = Evidence(values_of(ranks, found.words))
    return Assessed(found.kind, dp, Severity.CRITICAL, found.sentence, found.step, ranks, found.since_unix, evidence)
