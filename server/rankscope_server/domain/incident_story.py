"""
What happened, in the sentences that stand above an incident: which rank did what, at which step, and how it began.
"""

import re
from collections.abc import Iterator, Sequence

from rankscope_server.domain.facts import in_one_voice, joined
from rankscope_server.domain.incident import IncidentCard, IncidentLife, IncidentView
from rankscope_server.domain.incident_life import LEVELS, Incident
from rankscope_server.domain.model import Finding, FindingKind, RankValue
from rankscope_server.domain.requests import short_request
from rankscope_server.domain.state import sentence_case

_PARTING = (FindingKind.BATCH_MISMATCH, FindingKind.WIDTH_MISMATCH, FindingKind.GUARD_DISAGREEMENT)
"""
Findings after which ranks do not come together again; of several at one step, the first of these is the cause.
"""

WORDS_TOLD = 4
"""
Different words of ranks that a sentence holds at most; the evidence has all.
"""

_ALL_MASKED = re.compile(r"all (\d+) requests masked|its only request masked")


def build_card(incident: Incident) -> IncidentCard:
    """
    The incident in a list.
    """
    return IncidentCard(
        id=incident.id,
        deployment=incident.deployment,
        engine=incident.engine,
        life=incident.life,
        kind=incident.kind,
        severity=incident.severity,
        sentence=tell(incident),
        step=incident.step,
        opened_unix=incident.opened_unix,
        changed_unix=incident.changed_unix,
        closed_unix=incident.closed_unix,
    )


def build_incident(incident: Incident) -> IncidentView:
    """
    Everything that the page of the incident shows.
    """
    return IncidentView(
        card=build_card(incident),
        model=incident.model,
        vllm_version=incident.vllm_version,
        runner=incident.runner,
        findings=incident.findings,
        timeline=incident.timeline,
        captures=incident.captures,
    )


def tell(incident: Incident) -> str:
    """
    What a tired person reads: what happened last and worst, then how it began, then what was done about it.
    """
    return " ".join(f"{sentence_case(part)}." for part in _parts(incident))


def _parts(incident: Incident) -> Iterator[str]:
    parting, mask = _parting(incident), incident.finding(FindingKind.MASK_DISAGREEMENT)
    drift, wedged = incident.finding(FindingKind.DRIFT), incident.finding(FindingKind.WEDGED)
    mixed, lost = incident.finding(FindingKind.MITIGATION_MIXED), incident.finding(FindingKind.RANK_LOST)
    stalled, blind = incident.finding(FindingKind.STALLED), incident.finding(FindingKind.BLIND)
    if lost is not None and parting is None:
        yield _told(lost)
    if parting is not None:
        yield _tell_parting(parting, incident)
    elif mask is not None:
        yield _tell_mask(mask)
    elif wedged is not None:
        yield _told(wedged)
    elif stalled is not None and lost is None:
        yield _tell_stall(stalled)
    if drift is not None:
        yield _tell_drift(drift, incident)
    if parting is not None and mask is not None and _before(mask, parting):
        yield f"{_wrong_since(mask)}, where masked requests first differed"
    if mixed is not None:
        yield _told(mixed) if mixed.open else "for a while, ranks disagreed about the trim fix"
    yield from _tell_fix(incident)
    if lost is not None and parting is not None:
        yield _told(lost)
    elif wedged is not None and parting is not None:
        yield _tell_wedge(wedged, incident)
    elif wedged is not None and mask is not None:
        yield _told(wedged)
    if blind is not None and (blind.open or len(incident.findings) == 1):
        yield f"{'not' if blind.open else 'for a while, not'} everything is seen: {_bare(blind)}"


def _parting(incident: Incident) -> Finding | None:
    found = [finding for finding in incident.findings if finding.kind in _PARTING]
    return min(found, key=lambda one: (one.step or 0, _PARTING.index(one.kind)), default=None)


def _before(first: Finding, second: Finding) -> bool:
    return first.step is not None and second.step is not None and first.step < second.step


def _bare(finding: Finding) -> str:
    return finding.sentence.rstrip(".")


def _told(finding: Finding) -> str:
    return _bare(finding) if finding.open else f"for a while: {_bare(finding)}"


def _tell_parting(finding: Finding, incident: Incident) -> str:
    values = finding.evidence.values
    skipping = [value for value in values if value.value.startswith("skip")]
    posting = [value for value in values if value.value.startswith("broadcast")]
    if finding.kind is FindingKind.GUARD_DISAGREEMENT and skipping and posting:
        why = _believed(skipping)
        because = f": {why}" if why else ""
        if any(value.rank.pp_rank == incident.reach - 1 for value in skipping):  # the last pipeline rank sends
            return f"{_labels(skipping)} sent nothing at step {finding.step}{because}; {_labels(posting)} waited for it"
        return f"{_labels(skipping)} stopped receiving at step {finding.step}{because}; {_labels(posting)} broadcast"
    if finding.kind is FindingKind.BATCH_MISMATCH and values:
        return f"{_labels(values)} were given different batches at step {finding.step}: {_said(values)}"
    if finding.kind is FindingKind.WIDTH_MISMATCH and values:
        said = _said(values)
        return f"{_labels(values)} posted the sampled-token exchange of step {finding.step} differently: {said}"
    return _bare(finding)


def _believed(skipping: Sequence[RankValue]) -> str:
    """
    Why ranks skipped: a batch of which every request is masked looks to them like one that is all prefill.
    """
    matches = [_ALL_MASKED.search(value.value) for value in skipping]
    if not all(matches) or matches[0] is None:
        return ""
    count = matches[0].group(1)
    who = "it" if len(skipping) == 1 else "they"
    return f"{who} believed {f'all {count} requests were' if count else 'its only request was'} prefill"


def _tell_wedge(finding: Finding, incident: Incident) -> str:
    if not finding.open:
        return "the engine was wedged for a while"
    if incident.life is IncidentLife.CLOSED:
        return "the engine was wedged until it ended"
    return "the engine is wedged until it is restarted"


def _tell_mask(finding: Finding) -> str:
    values = finding.evidence.values
    if not values:
        return f"output {'is' if finding.open else 'was'} wrong: {_bare(finding)}"
    return f"{_wrong_since(finding)}, where ranks masked different requests: {_said(values)}"


def _wrong_since(finding: Finding) -> str:
    return (
        f"output is wrong since step {finding.step}"
        if finding.open
        else f"output was wrong from step {finding.step} on"
    )


def _tell_stall(finding: Finding) -> str:
    if not finding.open:
        return f"no rank moved for a while with step {finding.step} in flight; no disagreement was found"
    return _bare(finding)


def _tell_drift(finding: Finding, incident: Incident) -> str:
    evidence = finding.evidence
    first = f" with request {short_request(evidence.began_with)}" if evidence.began_with else ""
    began = f"drift began at step {finding.step}{first}"
    if any(one.kind in LEVELS for one in incident.findings if one is not finding):
        return began
    told = f"{began}: {_said(evidence.values)}" if evidence.values else _bare(finding)
    return f"{told}. No mask and no guard decision has differed" if incident.compared else told


def _tell_fix(incident: Incident) -> Iterator[str]:
    """
    What a toggle of the trim fix did to the drift, if there was one.
    """
    if not incident.acted:
        return
    mark, drift = incident.acted[-1], incident.finding(FindingKind.DRIFT)
    turned = f"the trim fix was turned {'on' if mark.desired else 'off'} at step {mark.step}"
    if not mark.desired or drift is None:
        yield turned
    elif drift.open:
        yield f"{turned}; drift has not ended yet"
    elif incident.drift_last is None or incident.drift_last < mark.step - 2 * incident.reach:
        yield turned  # it was over already, or it is not known where it ended
    elif incident.drift_last <= mark.step + 2 * incident.reach:
        yield f"{turned}; drift ended there"
    else:
        yield f"{turned}; drift ended at step {incident.drift_last}"


def _labels(values: Sequence[RankValue]) -> str:
    return joined(value.label for value in values)


def _said(values: Sequence[RankValue]) -> str:
    """
    What ranks said, those that said the same together.
    """
    said: dict[str, list[str]] = {}
    for value in values:
        said.setdefault(value.value, []).append(value.label)
    parts = [in_one_voice(labels, word) for word, labels in said.items()]
    more = [f"and {len(parts) - WORDS_TOLD} other words"] if len(parts) > WORDS_TOLD else []
    return "; ".join((*parts[:WORDS_TOLD], *more))
