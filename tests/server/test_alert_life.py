"""The life of alerts."""

import dataclasses

from made_ranks import START_UNIX

from rankscope_server.domain.alert import AlertState
from rankscope_server.domain.alert_life import Change, follow, restored
from rankscope_server.domain.alert_rules import AlertKey, Condition, Timing
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.model import Severity

EXPORTER = "http://a:9610"
TIMINGS = {"RankscopeMitigationMixed": Timing(2.0, 15.0), "RankscopeStalled": Timing(0.0, 30.0)}


class Life:
    """The alerts of one deployment, over time."""

    def __init__(self):
        self.alerts = {}
        self.now = Moment(START_UNIX, 1000.0)
        self.reached = {EXPORTER: True}
        self.told = []

    def look(self, *conditions, after=0.0, wall=None):
        self.now = Moment(self.now.unix + (after if wall is None else wall), self.now.monotonic + after)
        self.alerts, transitions = follow(self.alerts, conditions, self.reached, TIMINGS, self.now)
        self.told += [transition.change for transition in transitions]
        return [transition.change for transition in transitions]

    @property
    def states(self):
        return [alert.state for alert in self.alerts.values()]


def mixed(severity=Severity.CRITICAL, name="RankscopeMitigationMixed"):
    return Condition(AlertKey(name, "chat", "e1"), severity, "mixed", (EXPORTER,))


def stalled(severity=Severity.WARNING):
    return mixed(severity, "RankscopeStalled")


def test_an_alert_fires_when_its_condition_has_held_for_long_enough():
    """And is resolved when it has been over for long enough; both are told once."""
    life = Life()
    assert life.look(mixed()) == []
    assert life.states == [AlertState.PENDING]
    assert life.look(mixed(), after=1.9) == []
    assert life.look(mixed(), after=0.2) == [Change.FIRING]
    assert life.look(mixed(), after=60) == []
    assert life.look(after=1) == []
    assert life.look(after=14.9) == []
    assert life.look(after=0.2) == [Change.RESOLVED]
    assert life.look(after=60) == []
    assert life.alerts == {}


def test_what_is_over_before_it_fires_was_nothing():
    """The next time its hold time begins anew."""
    life = Life()
    life.look(mixed())
    life.look(after=1.5)
    assert life.alerts == {}
    assert life.look(mixed(), after=1) == []
    assert life.look(mixed(), after=1.5) == []
    assert life.look(mixed(), after=0.6) == [Change.FIRING]


def test_without_a_hold_time_it_fires_at_the_first_look():
    """The lead before a wedge can be seconds."""
    assert Life().look(stalled()) == [Change.FIRING]


def test_flapping_tells_nobody_anything():
    """What comes back within the keep time was never over."""
    life = Life()
    life.look(stalled())
    for _ in range(20):
        assert life.look(after=20) == []
        assert life.look(stalled(), after=5) == []
    assert life.look(after=29) == []
    assert life.look(after=31) == [Change.RESOLVED]


def test_a_firing_alert_that_gets_worse_is_told_once():
    """It does not get better before it is resolved."""
    life = Life()
    life.look(stalled())
    assert life.look(stalled(Severity.CRITICAL), after=50) == [Change.WORSE]
    assert life.look(stalled(Severity.WARNING), after=1) == []
    assert life.look(stalled(Severity.CRITICAL), after=1) == []
    life.look(after=1)
    assert life.look(after=31) == [Change.RESOLVED]


def test_what_is_not_seen_changes_nothing():
    """However long its exporter is out of reach; once that is back, the keep time begins."""
    life = Life()
    life.look(stalled())
    life.reached[EXPORTER] = False
    assert life.look(after=5) == []
    assert life.look(after=86400) == []
    life.reached[EXPORTER] = True
    assert life.look(after=1) == []
    assert life.look(after=29) == []
    assert life.look(after=2) == [Change.RESOLVED]


def test_a_gap_in_sight_begins_the_keep_time_anew():
    """Nobody knows what was in between."""
    life = Life()
    life.look(stalled())
    life.look(after=1)
    life.reached[EXPORTER] = False
    life.look(after=20)
    life.reached[EXPORTER] = True
    assert life.look(after=20) == []
    assert life.look(after=31) == [Change.RESOLVED]


def test_an_exporter_that_is_watched_no_more_is_not_waited_for():
    """It was taken out of the settings."""
    life = Life()
    life.look(stalled())
    life.reached = {}
    life.look(after=1)
    assert life.look(after=31) == [Change.RESOLVED]


def test_a_jump_of_the_wall_clock_fires_and_resolves_nothing():
    """Forwards or backwards, by a year."""
    year = 365 * 86400
    life = Life()
    life.look(mixed())
    assert life.look(mixed(), after=0.1, wall=year) == []
    life.look(mixed(), after=3, wall=-2 * year)
    assert life.told == [Change.FIRING]
    life.look(after=0.1, wall=year)
    assert life.look(after=0.1, wall=3 * year) == []
    assert life.look(after=14, wall=-3 * year) == []
    assert life.look(after=2) == [Change.RESOLVED]


def test_after_a_restart_the_keep_time_begins_anew():
    """Another run has another monotonic clock."""
    life = Life()
    life.look(stalled())
    life.look(after=29)
    again = Life()
    again.now = Moment(life.now.unix + 5, 3.0)
    again.alerts = {key: restored(alert, again.now) for key, alert in life.alerts.items()}
    again.reached[EXPORTER] = False
    assert again.look(after=100) == []
    again.reached[EXPORTER] = True
    assert again.look(after=1) == []
    assert again.look(after=29) == []
    assert again.look(after=2) == [Change.RESOLVED]


def test_an_alert_that_comes_back_is_another_one():
    """With an id of its own, also after a jump of a clock."""
    life = Life()
    ids = set()
    for _ in range(5):
        life.look(stalled(), after=1, wall=0)
        ids |= {alert.id for alert in life.alerts.values()}
        life.look(after=1, wall=0)
        life.look(after=31, wall=0)
    assert len(ids) == 5


def test_the_summary_is_that_of_now():
    """Without being told again."""
    life = Life()
    life.look(stalled())
    assert life.look(dataclasses.replace(stalled(), summary="for 3 min now"), after=180) == []
    assert [alert.summary for alert in life.alerts.values()] == ["for 3 min now"]
