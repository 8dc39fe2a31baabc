"""
What a replay comes to: one sentence, the findings in order of cause, what was foreseen, and what is not known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankscope_exporter.contract import RankLife
from rankscope_server.domain.facts import REACH_SECONDS, RankFacts, joined, seconds
from rankscope_server.domain.incident_life import Incident
from rankscope_server.domain.incident_story import tell
from rankscope_server.domain.model import FindingKind, State
from rankscope_server.domain.outlook import Forecast, Outlook
from rankscope_server.domain.state import engine_headline, engine_state
from rankscope_server.replay.playing import Found, Played

_CAUSES = (
    FindingKind.MITIGATION_MIXED,
    FindingKind.DRIFT,
    FindingKind.MASK_DISAGREEMENT,
    FindingKind.BATCH_MISMATCH,
    FindingKind.WIDTH_MISMATCH,
    FindingKind.GUARD_DISAGREEMENT,
    FindingKind.RANK_LOST,
    FindingKind.STALLED,
    FindingKind.WEDGED,
    FindingKind.BLIND,
)
"""
What comes of what: the order of findings that came to be at one moment. What is not seen stands last.
"""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """
    What was foreseen at a moment, and how it came.
    """

    at_unix: float
    forecast: Forecast
    parted_after_seconds: float | None
    """Seconds from then until guard decisions differed; None if they did not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    What is to be said about a replayed engine.
    """

    state: State
    sentence: str
    found: tuple[Found, ...]
    """In order of cause."""
    first_drift_unix: float | None
    foreseen: tuple[Foreseen, ...]
    notes: tuple[str, ...]


def assess_played(played: Played, *, until_given: bool = False) -> Verdict:
    """
    The verdict on a replayed engine. With `until_given` somebody vouches for the time that passed after the last records.
    """
    state = engine_state(played.facts, played.memory)
    sentence = (
        " ".join(_tell_incident(incident, last=incident is played.incidents[-1]) for incident in played.incidents)
        or f"Nothing found: {_uncapitalised(engine_headline(played.facts, played.memory, played.ended))}."
    )
    drifts = [found.finding.since_unix for found in played.found if found.finding.kind is FindingKind.DRIFT]
    return Verdict(
        state=state,
        sentence=sentence,
        found=tuple(sorted(played.found, key=_cause)),
        first_drift_unix=min(drifts, default=None),
        foreseen=tuple(_foreseen(played)),
        notes=(*played.engine.notes, *_notes(played, until_given=until_given)),
    )


def _tell_incident(incident: Incident, *, last: bool) -> str:
    return tell(incident) if last else f"Before that: {tell(incident)}"


def _uncapitalised(text: str) -> str:
    return text[:1].lower() + text[1:]


def _cause(found: Found) -> tuple[bool, float, int]:
    kind = found.finding.kind
    return kind is FindingKind.BLIND, found.finding.since_unix, _CAUSES.index(kind)


def _foreseen(played: Played) -> Iterator[Foreseen]:
    """
    The first forecast that named a time, and the last one before the ranks parted; one that is not in sight or unknown
    where none named a time.
    """
    made = played.forecasts
    if not made:
        return
    guards = [f.finding.since_unix for f in played.found if f.finding.kind is FindingKind.GUARD_DISAGREEMENT]
    parted = min(guards, default=None)
    timed = [one for one in made if one[1].outlook is Outlook.IN_SIGHT]
    chosen = [timed[0], timed[-1]] if timed else [made[-1]]
    for unix, forecast in dict.fromkeys(chosen):
        yield Foreseen(unix, forecast, None if parted is None else parted - unix)


def _notes(played: Played, *, until_given: bool) -> Iterator[str]:
    ranks = played.facts.ranks
    taken = {rank.label: rank.taken for rank in played.engine.ranks}
    if not until_given and not played.memory.has(FindingKind.WEDGED, FindingKind.STALLED):
        yield from _undated([rank for rank in ranks if taken[rank.label].ns is None])
    for rank in played.engine.ranks:
        if rank.taken.age_seconds > REACH_SECONDS:
            yield f"nothing had been heard of {rank.label} for {seconds(rank.taken.age_seconds)} when the copy was made"
    for life, fate in ((RankLife.GONE, "had ended"), (RankLife.STOPPED, "was stopped by a signal")):
        lost = [rank.label for rank in ranks if taken[rank.label].life is life and rank.report.life is not life]
        if lost:
            yield f"{_processes(lost)} {fate if len(lost) == 1 else fate.replace('was', 'were')} by the time the copy was made"
    lives = (None, RankLife.UNKNOWN)
    unknown = [rank.label for rank in ranks if taken[rank.label].life in lives]
    if unknown:
        yield f"whether {_processes(unknown)} lived is not known: nothing that is here tells"
    first = max((rank.history.first for rank in ranks), default=0)
    if first > 1:
        steps = ((found.finding.kind, found.finding.step) for found in played.found)
        older = dict.fromkeys(kind.value for kind, step in steps if step is not None and step <= first)
        since = f"; {joined(older)} may have begun before it" if older else ""
        yield f"nothing is known of the steps before step {first}: the ring holds no more{since}"
    if played.left_out:
        yield f"step records with times that make no sense were left out: {played.left_out}"


def _undated(ranks: Sequence[RankFacts]) -> Iterator[str]:
    """
    What is not known because a copy does not say when it was made.
    """
    hanging = [rank for rank in ranks if rank.in_flight]
    if hanging:
        steps = sorted({rank.history.last for rank in hanging})
        named = f"step {steps[0]}" if len(steps) == 1 else f"steps {joined(map(str, steps))}"
        yield (
            f"the copy of {joined(rank.label for rank in hanging)} does not say when it was made: whether {named} hung or "
            f"{'was' if len(steps) == 1 else 'were'} just under way is unknown; --until TIME tells"
        )


def _processes(labels: Sequence[str]) -> str:
    return f"the process of {labels[0]}" if len(labels) == 1 else f"the processes of {joined(labels)}"
