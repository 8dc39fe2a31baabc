"""The life of an incident, from one look at its engine to the next."""

import dataclasses

import pytest
from made_ranks import ManualClock, made_engine, made_rank, made_record, made_records, made_report

from rankscope_exporter.contract import HookReport, HookState, RankLife
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.incident import IncidentEvent, IncidentLife
from rankscope_server.domain.incident_life import (
    CLOSE_SECONDS,
    TIMELINE_HEAD,
    TIMELINE_KEPT,
    follow,
    last_drifting_step,
    note,
)
from rankscope_server.domain.model import ActedMark, Evidence, Finding, FindingKind, RankId, Severity

PP0, PP1 = RankId(0, 0, 0), RankId(0, 1, 0)
CRITICAL = {
    FindingKind.MASK_DISAGREEMENT,
    FindingKind.GUARD_DISAGREEMENT,
    FindingKind.WEDGED,
    FindingKind.RANK_LOST,
    FindingKind.MITIGATION_MIXED,
}


def finding(kind, step=10, ranks=(PP0, PP1), severity=None, **changes):
    severity = severity or (Severity.CRITICAL if kind in CRITICAL else Severity.WARNING)
    return Finding(kind, severity, f"{kind.value} at step {step}", step, ranks, 100.0, found_unix=100.5, **changes)


class Watched:
    """An engine of two ranks that is looked at; a test says what holds."""

    def __init__(self):
        self.clock = ManualClock()
        self.incident = None
        self.acted = ()
        self.reports = [made_report(0), made_report(1)]
        self.answered = 0.0
        """How long ago its exporter answered; None if it never did."""
        self.replaced = False
        self.records = made_records(1, 30)

    def look(self, *kinds, seconds=1.0, forgotten=(), healed=()):
        """Let time pass and look: `kinds` hold; the server does not remember what is `forgotten`."""
        self.clock.advance(seconds)
        now = self.clock.now()
        current = [one if isinstance(one, Finding) else finding(one) for one in kinds]
        held = [one for one in current if one.kind not in forgotten] + [finding(kind) for kind in healed]
        memory = EngineMemory(findings={(one.kind, 0): one for one in held}, acted=self.acted)
        ranks = [made_rank(self.records, report, now=now, quiet=0.1) for report in self.reports]
        error = "refused" if self.answered is None or self.answered > 3 else ""
        answered = float("inf") if self.answered is None else now.monotonic - self.answered
        engine = made_engine(*ranks, now=now, answered=answered, error=error, replaced=self.replaced)
        self.incident, events = follow(self.incident, engine, memory, current, now)
        return [event.what for event in events]

    @property
    def life(self):
        return self.incident.life


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_nothing_opens_nothing(watched):
    """A healthy engine has no incident."""
    assert watched.look() == []
    assert watched.incident is None


def test_it_worsens_wedges_and_ends_with_the_restart(watched):
    """Drift, masks, guards, a wedge, a restart of vLLM: one incident, an entry for each."""
    drift, mask, guard = FindingKind.DRIFT, FindingKind.MASK_DISAGREEMENT, FindingKind.GUARD_DISAGREEMENT

    assert watched.look(drift) == ["found"]
    first = watched.incident.id
    assert watched.look(drift) == []
    assert (watched.look(drift, mask), watched.life) == (["worsening"], IncidentLife.WORSENING)
    assert (watched.look(drift, mask, guard), watched.life) == (["found"], IncidentLife.WORSENING)
    assert (watched.look(drift, mask, guard, FindingKind.WEDGED), watched.life) == (["wedged"], IncidentLife.WEDGED)
    watched.reports = [made_report(pp, life=RankLife.GONE) for pp in (0, 1)]
    assert (watched.look(mask, guard), watched.life) == (["over", "over", "ended"], IncidentLife.WEDGED)
    watched.replaced = True
    assert (watched.look(mask, guard), watched.life) == (["closed"], IncidentLife.CLOSED)
    assert watched.incident.id == first
    assert watched.incident.closed_unix == watched.clock.now().unix
    assert watched.look(mask, guard) == []  # an engine that was replaced opens none
    assert watched.incident is None


def test_what_is_found_in_one_look_has_not_worsened(watched):
    """A server that comes late opens an incident of what it finds."""
    watched.look(
        FindingKind.WEDGED,
        finding(FindingKind.GUARD_DISAGREEMENT, 12),
        finding(FindingKind.MASK_DISAGREEMENT, 12),
        FindingKind.BLIND,
        FindingKind.DRIFT,
    )

    assert watched.life is IncidentLife.WEDGED
    assert [event.what for event in watched.incident.timeline] == ["found", "wedged", "found", "found", "found"]
    assert [one.kind.value for one in watched.incident.findings] == [
        "drift",
        "wedged",
        "blind",
        "mask disagreement",
        "guard disagreement",
    ]


def test_a_less_bad_finding_does_not_worsen_it(watched):
    """Drift that joins a mask disagreement is only found."""
    watched.look(FindingKind.MASK_DISAGREEMENT)
    watched.look(FindingKind.MASK_DISAGREEMENT, FindingKind.DRIFT)

    assert watched.life is IncidentLife.OPEN


def test_it_recovers_and_closes_in_time(watched):
    """Two minutes in which nothing holds; the fix that did it is in the timeline."""
    watched.look(FindingKind.DRIFT)
    watched.acted = (ActedMark(3, True, 25, watched.clock.now().unix + 0.5),)
    assert watched.look() == ["fix on", "over", "recovered"]
    assert watched.look(seconds=CLOSE_SECONDS - 1) == []
    assert (watched.look(), watched.life) == (["closed"], IncidentLife.CLOSED)
    assert [event.what for event in watched.incident.timeline] == ["found", "fix on", "over", "recovered", "closed"]
    assert watched.look() == []


def test_a_toggle_that_took_effect_before_is_not_told(watched):
    """Only what was done since it opened belongs to it."""
    watched.acted = (ActedMark(3, False, 5, watched.clock.now().unix),)
    watched.look(FindingKind.DRIFT)

    assert watched.incident.acted == ()


def test_what_recurs_in_time_is_the_same_incident(watched):
    """Afterwards it is another one."""
    watched.look(FindingKind.DRIFT)
    first = watched.incident.id
    watched.look(seconds=60)
    assert watched.look(FindingKind.DRIFT) == ["found"]
    assert (watched.life, watched.incident.timeline[-1].sentence) == (IncidentLife.OPEN, "Again: Drift at step 10")
    watched.look()
    watched.look(seconds=CLOSE_SECONDS)
    watched.look(FindingKind.DRIFT)
    assert watched.life is IncidentLife.OPEN
    assert watched.incident.id != first


def test_out_of_reach_it_stays_what_it_was(watched):
    """Nothing is over or closed while an exporter is silent; what is bad is believed."""
    watched.look(FindingKind.DRIFT)
    watched.answered = 9.0
    assert (watched.look(FindingKind.BLIND), watched.life) == (["found"], IncidentLife.OPEN)
    assert watched.incident.findings[0].open
    assert watched.look(FindingKind.BLIND, FindingKind.GUARD_DISAGREEMENT) == ["worsening"]
    watched.answered = 0.0
    assert "recovered" not in watched.look(FindingKind.GUARD_DISAGREEMENT)


def test_time_out_of_reach_does_not_close_it(watched):
    """The two minutes begin anew when it is seen again."""
    watched.look(FindingKind.DRIFT)
    watched.look()
    watched.answered = 9.0
    watched.look(FindingKind.BLIND, seconds=300)
    assert watched.life is IncidentLife.RECOVERED
    watched.answered = 0.0
    watched.look(seconds=CLOSE_SECONDS - 1)
    assert watched.life is IncidentLife.RECOVERED
    watched.look(seconds=CLOSE_SECONDS)
    assert watched.life is IncidentLife.CLOSED


def test_before_the_first_answer_nothing_is_over(watched):
    """A server that has just started knows of an engine before it knows its steps."""
    watched.look(FindingKind.DRIFT)
    watched.answered = None
    watched.look()

    assert watched.life is IncidentLife.OPEN


def test_blindness_alone_has_an_incident_that_others_join(watched):
    """A warning; what is found then does not worsen it, as nothing was known before."""
    watched.look(FindingKind.BLIND)
    assert watched.incident.severity is Severity.WARNING
    first = watched.incident.id
    watched.look(FindingKind.BLIND, FindingKind.DRIFT)
    assert (watched.incident.id, watched.life, watched.incident.level) == (first, IncidentLife.OPEN, 1)
    watched.look(FindingKind.BLIND)
    assert watched.life is IncidentLife.RECOVERED  # it was no less blind before
    watched.look(FindingKind.BLIND, seconds=CLOSE_SECONDS)
    assert watched.life is IncidentLife.CLOSED


def test_what_went_out_of_sight_since_does_not_recover(watched):
    """A hook that takes itself out ends no drift."""
    watched.look(FindingKind.DRIFT)
    watched.reports[0] = made_report(0, hooks=[HookReport(hook="_update_states", state=HookState.REMOVED)])
    watched.look(FindingKind.BLIND)
    assert watched.life is IncidentLife.OPEN
    watched.reports[0] = made_report(0)
    watched.look()
    assert watched.life is IncidentLife.RECOVERED
    watched.reports[0] = made_report(0, hooks=[HookReport(hook="_update_states", state=HookState.REMOVED)])
    watched.look(FindingKind.BLIND)
    assert watched.life is IncidentLife.OPEN


def test_what_cannot_become_untrue_stays_though_it_was_forgotten(watched):
    """A restart of the server with a store that had no room for the finding."""
    guard = FindingKind.GUARD_DISAGREEMENT
    watched.look(guard)
    watched.look()
    assert (watched.life, watched.incident.findings[0].open) == (IncidentLife.OPEN, True)


def test_masks_that_have_healed_are_history(watched):
    """With the fix on, an open mask disagreement no longer says what the engine is like."""
    mask = FindingKind.MASK_DISAGREEMENT
    watched.look(mask)
    assert watched.look(healed=[mask]) == ["over", "recovered"]
    assert "tokens that were wrong stay wrong" in watched.incident.timeline[-2].sentence


def test_a_stall_that_lasts_and_a_rank_that_is_waited_for_wedge(watched):
    """A critical stall; a lost rank only while its peers run."""
    watched.look(FindingKind.STALLED)
    assert watched.life is IncidentLife.OPEN
    assert watched.look(finding(FindingKind.STALLED, severity=Severity.CRITICAL)) == ["wedged"]
    assert watched.life is IncidentLife.WEDGED
    assert watched.look(FindingKind.DRIFT) == ["found", "over"]
    assert watched.life is IncidentLife.OPEN
    assert watched.look(FindingKind.DRIFT, finding(FindingKind.RANK_LOST, ranks=(PP0,))) == ["wedged"]
    watched.reports[1] = made_report(1, life=RankLife.STOPPED)
    watched.look(FindingKind.DRIFT, finding(FindingKind.RANK_LOST, ranks=(PP0,)))
    assert watched.life is IncidentLife.OPEN


def test_a_finding_keeps_where_it_began_and_takes_what_is_known_later(watched):
    """Its first step and time; the newest words; requests once they are known."""
    watched.look(finding(FindingKind.DRIFT, 10))
    later = dataclasses.replace(finding(FindingKind.DRIFT, 24), since_unix=900.0, evidence=Evidence(requests=("r7",)))
    watched.look(later)
    watched.look(dataclasses.replace(later, evidence=Evidence()))
    (kept,) = watched.incident.findings

    assert (kept.step, kept.since_unix, kept.sentence) == (10, 100.0, "drift at step 24")
    assert kept.evidence.requests == ("r7",)


def test_drift_tells_where_it_ended(watched):
    """The last step that drifted, on whichever rank."""
    watched.records = made_records(1, 30, lambda step: {"drift_max": 4 if step < 22 else 0})
    watched.look(FindingKind.DRIFT)
    watched.look()

    assert watched.incident.drift_last == 21
    assert "Drift is over: the last step that drifted was 21." in [e.sentence for e in watched.incident.timeline]


def test_no_drifting_step_is_held():
    """None is told where none is known."""
    now = ManualClock().now()
    engine = made_engine(made_rank(made_record(1), now=now), now=now)

    assert last_drifting_step(engine) is None


def test_a_clock_that_was_set_back_turns_no_order_round(watched):
    """What happens later is told later."""
    watched.look(FindingKind.DRIFT)
    watched.look(FindingKind.DRIFT, FindingKind.MASK_DISAGREEMENT, seconds=10)
    watched.clock.moment = dataclasses.replace(watched.clock.moment, unix=watched.clock.moment.unix - 3600)
    watched.look(FindingKind.DRIFT, FindingKind.MASK_DISAGREEMENT, FindingKind.WEDGED)
    times = [event.at_unix for event in watched.incident.timeline]

    assert times == sorted(times)
    assert [event.what for event in watched.incident.timeline] == ["found", "worsening", "wedged"]


def test_notes_go_to_their_place(watched):
    """What was done a little earlier than it was told, and never before it opened."""
    watched.look(FindingKind.DRIFT)
    opened = watched.incident.opened_unix
    watched.look(FindingKind.DRIFT, FindingKind.MASK_DISAGREEMENT, seconds=5)
    told = note(watched.incident, IncidentEvent(opened + 2, "fix asked", ""), IncidentEvent(opened - 9, "alert", ""))

    assert [event.what for event in told.timeline] == ["found", "alert", "fix asked", "worsening"]


def test_a_timeline_is_bounded_and_says_so(watched):
    """How it began and what came last are kept."""
    for _ in range(TIMELINE_KEPT):
        watched.look(FindingKind.DRIFT)
        watched.look(seconds=3)
    timeline = watched.incident.timeline

    assert len(timeline) == TIMELINE_KEPT
    assert timeline[TIMELINE_HEAD].what == "left out"
    assert timeline[TIMELINE_HEAD].sentence.startswith(f"{watched.incident.left_out} entries")
    assert sum(event.what == "left out" for event in timeline) == 1
    assert watched.incident.left_out + len(timeline) - 1 == 3 * TIMELINE_KEPT
    assert [event.at_unix for event in timeline] == sorted(event.at_unix for event in timeline)
