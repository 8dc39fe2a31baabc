"""Which alerts hold, told by findings and forecasts."""

import dataclasses

import pytest
from made_ranks import START_UNIX, made_engine, made_rank, made_records, made_report

from rankscope_exporter.contract import RankLife
from rankscope_server.domain.alert_rules import RULES, assess_engine, assess_exporters, assess_receiver
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import ExporterFacts
from rankscope_server.domain.model import Finding, FindingKind, RankId, Severity
from rankscope_server.domain.outlook import UNFORESEEN, Forecast, Outlook

NOW = Moment(START_UNIX, 1000.0)


def engine(life=RankLife.RUNNING, *, replaced=False):
    ranks = [made_rank(made_records(1, 20), made_report(pp, life=life), now=NOW) for pp in (0, 1)]
    return made_engine(*ranks, now=NOW, replaced=replaced)


def finding(kind=FindingKind.DRIFT, severity=Severity.WARNING, *, dp=0, sentence="pp0 counts too much"):
    return Finding(kind, severity, sentence, 7, (RankId(dp, 0, 0),), START_UNIX - 5)


def in_sight(earliest, latest=180.0):
    return Forecast(Outlook.IN_SIGHT, "4 of 6 requests masked", earliest, latest, "pp0")


def names(conditions):
    return [condition.key.name for condition in conditions]


def test_every_kind_of_finding_has_its_alert():
    """Named alike, with a meaning."""
    for kind in FindingKind:
        (condition,) = assess_engine(engine(), [finding(kind)], UNFORESEEN)
        rule = RULES[condition.key.name]
        assert rule.kind == kind.value
        assert rule.meaning.endswith(".")


def test_a_condition_says_what_was_found_where_and_who_could_tell_that_it_is_over():
    """The finding's sentence, since when, and its exporters."""
    (condition,) = assess_engine(engine(), [finding()], UNFORESEEN, incident="i-1")
    assert (condition.key.deployment, condition.key.engine, condition.severity) == ("chat", "e1", Severity.WARNING)
    assert condition.summary == "pp0 counts too much"
    assert (condition.sources, condition.incident) == (("http://a:9610",), "i-1")


def test_the_same_at_several_data_parallel_groups_is_one_alert():
    """As loud as the loudest of them."""
    found = [
        finding(FindingKind.STALLED, sentence="no rank moves"),
        finding(FindingKind.STALLED, Severity.CRITICAL, dp=2),
    ]
    (condition,) = assess_engine(engine(), found, UNFORESEEN)
    assert condition.severity is Severity.CRITICAL
    assert condition.summary == "No rank moves (and the like at dp2)"


@pytest.mark.parametrize(
    ("forecast", "fires"),
    [
        (in_sight(599), True),
        (in_sight(601), False),
        (Forecast(Outlook.NOT_IN_SIGHT, "nothing drifts"), False),
        (UNFORESEEN, False),
    ],
)
def test_a_wedge_in_sight_is_an_alert(forecast, fires):
    """If it may come within the minutes that were set; what is not known raises none."""
    found = assess_engine(engine(), [], forecast)
    assert names(found) == (["RankscopeForecast"] if fires else [])
    assert all(condition.severity is Severity.WARNING for condition in found)


def test_a_forecast_is_told_as_a_span():
    """With what it rests on."""
    (condition,) = assess_engine(engine(), [], in_sight(40))
    assert condition.summary == (
        "All requests of a batch will be masked on pp0 in 40 s to 3 min, if traffic goes on like this (4 of 6 requests masked)"
    )


def test_a_forecast_that_ends_in_hours_tells_where_it_begins():
    """`In 2 s to 4 h` says less than that it may come at any time."""
    (condition,) = assess_engine(engine(), [], dataclasses.replace(in_sight(2.2), latest_seconds=4 * 3600.0))
    assert condition.summary == (
        "All requests of a batch may be masked on pp0 at any time from 2.2 s on, if traffic goes on like this (4 of 6 requests masked)"
    )


def test_a_wedge_lasts_until_something_takes_its_place():
    """Its processes are killed to restart it: that they are gone is no news, and nothing else of it matters any more."""
    found = [
        finding(FindingKind.WEDGED, Severity.CRITICAL),
        finding(FindingKind.RANK_LOST, Severity.CRITICAL),
        finding(FindingKind.GUARD_DISAGREEMENT, Severity.CRITICAL),
    ]
    assert names(assess_engine(engine(RankLife.GONE), found, in_sight(40))) == ["RankscopeWedged"]
    assert names(assess_engine(engine(RankLife.GONE), found[1:], in_sight(40))) == ["RankscopeRankLost"]
    assert names(assess_engine(engine(RankLife.GONE), found[2:], in_sight(40))) == []
    assert names(assess_engine(engine(RankLife.GONE, replaced=True), found, UNFORESEEN)) == []


def test_an_exporter_of_which_no_engine_is_known_is_missed():
    """One that answers is not, nor one that speaks of an engine: there the engine is blind."""
    silent = ExporterFacts("http://b:9610", None, "connection refused", None, False, 0.0)
    (condition,) = assess_exporters("chat", [engine()], [silent], NOW)
    assert (condition.key.name, condition.key.engine) == ("RankscopeBlind", "")
    assert condition.summary == "Exporter http://b:9610 has never answered: connection refused"
    assert assess_exporters("chat", [], [dataclasses.replace(silent, answered=999.0)], NOW) == ()
    assert assess_exporters("chat", [engine()], [dataclasses.replace(silent, url="http://a:9610")], NOW) == ()


def test_a_receiver_that_fails_is_an_alert_of_its_own():
    """With what waits for it."""
    condition = assess_receiver("ops", "connection refused", 2)
    assert (condition.key.name, condition.key.subject) == ("RankscopeReceiverFailing", "ops")
    assert condition.summary == "Alerts do not reach ops: connection refused; 2 notifications wait"
