"""
Values to geometry, words and advice.
"""

import dataclasses
import re

import fake_rankscope as views
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_server.domain.model import Series, State, ToggleProgress
from rankscope_server.domain.outlook import Forecast, Outlook
from rankscope_server.web import words
from rankscope_server.web.chart_feed import ChartFeed
from rankscope_server.web.drift_table import tabulate_drift
from rankscope_server.web.fragments import Fragment, Outbox
from rankscope_server.web.guidance import assess_card, assess_engine, foresees, order_by_need, summarise
from rankscope_server.web.links import element_id
from rankscope_server.web.recent import from_first_sample
from rankscope_server.web.sparkline import draw_sparkline
from rankscope_server.web.streams import announce, announce_all
from rankscope_server.web.strip import draw_strip


class TestWords:
    """
    Values to words.
    """

    def test_unknown_is_said(self) -> None:
        """What is not known is never shown as zero."""
        for word in (words.known(None), words.signed_drift(None), words.rate(None), words.moment(None)):
            assert "unknown" in word
        assert words.age(None) == "never"

    def test_zero_is_known(self) -> None:
        """Zero is a value."""
        assert (words.known(0), words.signed_drift(0), words.rate(0.0)) == ("0", "0", "0.0")

    def test_drift_has_a_sign(self) -> None:
        """Above and below zero differ in more than a digit."""
        assert (words.signed_drift(37), words.signed_drift(-2)) == ("+37", "\N{MINUS SIGN}2")

    def test_moment_escapes_nothing_and_says_utc(self) -> None:
        """A time is UTC in text and title, with the number for the page's script."""
        text = str(words.moment(1_780_000_000.4))
        assert 'title="2026-05-28 20:26:40 UTC"' in text
        assert 'data-unix="1780000000"' in text

    @pytest.mark.parametrize(
        ("said", "shown"),
        [
            ("the engine is idle", "The engine is idle."),
            ("pp0 is gone", "pp0 is gone."),
            ("vLLM is not there", "vLLM is not there."),
            ("http://a:1 does not answer", "http://a:1 does not answer."),
            ("Done!", "Done!"),
            ("", ""),
        ],
    )
    def test_sentence(self, said: str, shown: str) -> None:
        """A phrase becomes a sentence, and names in it keep their case."""
        assert words.sentence(said) == shown

    @pytest.mark.parametrize(
        ("acknowledged", "step", "spread", "desired", "shown"),
        [
            (1, 412, None, True, "Pending: 1 of 2 ranks have acted; they act at step 412"),
            (2, 412, 0, True, "Applied at step 412 on every rank"),
            (2, 412, 3, True, "Applied, but ranks acted up to 3 steps apart"),
            (2, 412, 0, False, "Taken back at step 412 on every rank"),
            (2, 0, 0, True, "Applied on every rank at the same step"),
            (2, 412, None, True, "Every rank has answered, and not all have acted: each says why"),
        ],
    )
    def test_progress(self, acknowledged: int, step: int, spread: int | None, desired: bool, shown: str) -> None:
        """How far a toggle has come is one sentence."""
        assert words.progress_sentence(ToggleProgress(desired, 4, step, acknowledged, 2, (), spread)) == shown

    @pytest.mark.parametrize(
        ("earliest", "latest", "shown"),
        [
            (0.0, 5.0, "within 5 s"),
            (0.4, 0.6, "within 1 s"),
            (7.9, 18.2, "in 7 to 19 s"),
            (44.0, 168.0, "in 40 s to 3 min"),
            (31.0, 61.0, "in 30 to 65 s"),
            (40.0, 40.0, "in about 40 s"),
            (61.0, 1799.0, "in 60 s to 30 min"),
            (95.0, 121.0, "in 1 to 3 min"),
            (600.0, 7000.0, "in 10 min to 2 h"),
        ],
    )
    def test_span(self, earliest: float, latest: float, shown: str) -> None:
        """A time to come is told in few digits, and never narrower than it is."""
        assert words.span(earliest, latest).replace("\N{NO-BREAK SPACE}", " ") == shown

    @given(st.floats(0, 1e5), st.floats(0, 1e5))
    def test_span_holds_what_it_is_of(self, one: float, other: float) -> None:
        """Whatever the times, what is told holds them."""
        earliest, latest = sorted((one, other))
        told = words.span(earliest, latest).replace("\N{NO-BREAK SPACE}", " ")
        sizes = {"s": 1, "min": 60, "h": 3600}
        *first, last = re.findall(r"(\d+) ?(s|min|h)?", told)
        assert int(last[0]) * sizes[last[1]] >= latest
        for number, unit in first:
            assert int(number) * sizes[unit or last[1]] <= earliest

    def test_forecast(self) -> None:
        """What is in sight is said with the rank and the time; an end that is not known is not made up."""
        seen = Forecast(Outlook.IN_SIGHT, "", 44.0, 168.0, "pp0")
        assert (
            words.forecast_phrase(seen)
            == "all requests masked on pp0 in 40\N{NO-BREAK SPACE}s to 3\N{NO-BREAK SPACE}min"
        )
        for endless in (None, 4 * 3600.0):  # nobody can plan with an end that is hours away
            told = words.forecast_phrase(dataclasses.replace(seen, latest_seconds=endless))
            assert told == "all requests masked on pp0 at any time from 40\N{NO-BREAK SPACE}s on"
        soon = dataclasses.replace(seen, earliest_seconds=0.4, latest_seconds=None)
        assert words.forecast_phrase(soon) == "all requests masked on pp0 at any time"

    @pytest.mark.parametrize(
        ("seconds", "shown"),
        [(0.4, "+0 s"), (41, "+41 s"), (125, "+2 min 5 s"), (180, "+3 min"), (9000, "+2 h 30 min")],
    )
    def test_elapsed(self, seconds: float, shown: str) -> None:
        """How long after the first of a timeline something came."""
        assert words.elapsed(seconds).replace("\N{NO-BREAK SPACE}", " ") == shown

    @pytest.mark.parametrize(("size", "shown"), [(999, "999 B"), (30_977, "31 kB"), (1_250_000, "1.2 MB")])
    def test_file_size(self, size: int, shown: str) -> None:
        """Sizes of files are told in units of thousand."""
        assert words.file_size(size).replace("\N{NO-BREAK SPACE}", " ") == shown

    @given(st.text(min_size=1), st.text(min_size=1))
    def test_element_ids(self, one: str, other: str) -> None:
        """Different names have different ids, made of characters that a selector takes as they are."""
        assert all(c.isascii() and (c.isalnum() or c in "-_") for c in element_id("x", one))
        assert (element_id("x", one) == element_id("x", other)) is (one == other)


class TestSparkline:
    """
    The sparkline.
    """

    def test_gaps_break_the_line(self) -> None:
        """Where nothing was known there is no line, and the stretch is marked."""
        drawn = draw_sparkline((0.0, 1.0, None, None, 2.0))
        assert drawn.line.count("M") == 2
        assert len(drawn.gaps) == 1

    def test_small_drift_stays_small(self) -> None:
        """One token of drift does not fill the height."""
        assert draw_sparkline((0.0, 1.0)).line.endswith("160.0 30.9")

    def test_nothing_known(self) -> None:
        """Without a value it says that nothing is known."""
        drawn = draw_sparkline((None, None))
        assert (drawn.line, drawn.peak, drawn.summary) == ("", None, "Largest drift: unknown so far")
        assert draw_sparkline(()).line == ""

    @given(st.lists(st.none() | st.floats(-50, 5000)))
    def test_stays_inside(self, values: list[float | None]) -> None:
        """Whatever the values, the line stays inside the picture."""
        drawn = draw_sparkline(tuple(values))
        for point in drawn.line.replace("M", "L").split("L")[1:]:
            x, y = map(float, point.split())
            assert 0 <= x <= drawn.width + 0.1
            assert 0 <= y <= drawn.height


class TestStrip:
    """
    The strip of guard decisions.
    """

    def test_differing_step(self) -> None:
        """A step at which ranks differ is named with what each decided."""
        drawn = draw_strip(views.wedged().strip)
        assert [differing.sentence for differing in drawn.differing] == ["step 72: pp0 skip, pp1 broadcast"]
        assert drawn.summary.endswith("different at 1.")

    def test_every_cell_has_a_title(self) -> None:
        """Each decision can be read."""
        drawn = draw_strip(views.wedged().strip)
        assert len(drawn.cells) == 96
        assert drawn.cells[-1].title == "pp1, step 73: no record"

    def test_no_step(self) -> None:
        """An engine without a step has an empty strip."""
        assert draw_strip(views.strip(0, steps=0)).summary == "No step yet."


class TestDriftTable:
    """
    The table behind the chart.
    """

    def test_largest_in_each_period(self) -> None:
        """A row is the largest of its five seconds; the period that still runs is left out."""
        series = Series(
            [10.0, 11.0, 14.0, 15.0, 16.0, 20.0], ["pp0", "pp1"], [[0.0, 7.0, 3.0, 1.0, 2.0, 99.0], [None] * 6]
        )
        assert tabulate_drift(series).rows == ((15.0, (2.0, None)), (10.0, (7.0, None)))

    def test_empty(self) -> None:
        """No samples, no rows."""
        assert tabulate_drift(Series()).rows == ()


class TestGuidance:
    """
    What to do next.
    """

    def test_order_of_need(self) -> None:
        """The worst comes first."""
        cards = tuple(views.card(make()) for make in views.ALL_VIEWS)
        assert [card.name for card in order_by_need(cards)] == [
            "wedge",
            "lost",
            "v2-failed",
            "half",
            "baseline",
            "v2-drift",
            "dark",
            "canary",
            "steady",
            "v2",
        ]

    def test_summary_counts(self) -> None:
        """The fleet in one line."""
        summary = summarise(views.FakeRankscope(tuple(make() for make in views.ALL_VIEWS)).fleet())
        assert (summary.deployments, summary.engines, summary.ranks, summary.in_need) == (10, 10, 20, 7)
        assert summary.unknown_code == ("dark",)

    def test_drift_leads_to_the_fix(self) -> None:
        """A drifting deployment with the fix at hand leads to turning it on."""
        for step in (assess_card(views.card(views.drifting())), assess_engine(views.drifting())):
            assert step is not None
            assert step.action == "Turn the trim fix on"
            assert step.asks
            assert step.href.endswith("/fix?desired=on")

    def test_wedge_leads_to_a_restart(self) -> None:
        """A wedged engine is not offered the fix."""
        step = assess_engine(views.wedged())
        assert step is not None
        assert not step.asks
        assert "does not revive" in step.why

    def test_a_fix_on_some_ranks_only_leads_to_the_ranks(self) -> None:
        """Which ranks have it is what one needs to see."""
        step = assess_engine(views.half_fixed())
        assert step is not None
        assert (step.action, step.asks) == ("See which ranks have the fix", False)

    def test_drift_on_v2_leads_to_no_fix(self) -> None:
        """There is none for it, so nothing that turns one on is offered."""
        step = assess_engine(views.v2_drifting())
        assert step is not None
        assert step.href.endswith("#ranks")
        assert "not for this runner" in step.why

    def test_healthy_needs_nothing(self) -> None:
        """Where nothing is wrong nothing is asked for."""
        assert assess_engine(views.healthy()) is None
        assert assess_card(views.card(views.applied())) is None

    def test_forecast_is_said_where_it_matters(self) -> None:
        """A wedge in sight is always said; that none is only where something is wrong, and nothing of ranks that parted."""
        near, far = views.drifting().forecast, Forecast(Outlook.NOT_IN_SIGHT, "nothing drifts")
        said = {
            state: (
                foresees(dataclasses.replace(views.drifting(), state=state, forecast=near)),
                foresees(dataclasses.replace(views.drifting(), state=state, forecast=far)),
            )
            for state in State
        }
        assert {state for state, (in_sight, _) in said.items() if in_sight} == {s for s in State if s < State.PARTED}
        assert {state for state, (_, not_in_sight) in said.items() if not_in_sight} == {
            State.DRIFTING,
            State.MITIGATION_MIXED,
            State.OUTPUT_WRONG,
        }
        assert not foresees(dataclasses.replace(views.drifting(), ended=True))

    def test_refused_fix_is_not_offered(self) -> None:
        """A fix that cannot be turned on now is not the next step."""
        refused = dataclasses.replace(views.drifting(), fix=views.fix(can_turn_on=False, refusal="no token"))
        step = assess_engine(refused)
        assert step is not None
        assert not step.asks

    def test_ended_engine_does_not_lead(self) -> None:
        """An engine that has ended beside one that runs does not decide where the link leads."""
        card = views.card(views.drifting())
        ended = dataclasses.replace(card.engines[0], engine="old", state=State.WEDGED, ended=True)
        step = assess_card(dataclasses.replace(card, engines=(ended, *card.engines)))
        assert step is not None
        assert step.href == f"/deployments/baseline/engines/{views.ENGINES['baseline']}/fix?desired=on"

    def test_several_engines_are_asked_for_together(self) -> None:
        """The fix of a deployment with several engines is asked for the deployment."""
        card = views.card(views.drifting())
        step = assess_card(
            dataclasses.replace(card, engines=(*card.engines, dataclasses.replace(card.engines[0], engine="two")))
        )
        assert step is not None
        assert step.href == "/deployments/baseline/fix?desired=on"


class TestOutbox:
    """
    What one stream sends.
    """

    def test_only_what_changed(self) -> None:
        """A fragment is sent once until it changes."""
        outbox = Outbox()
        first, second = Fragment("a", "1", b"1"), Fragment("b", "1", b"1")
        assert outbox.due((first, second), 0.0) == [first, second]
        changed = Fragment("b", "2", b"2")
        assert outbox.due((first, changed), 0.1) == [changed]
        assert outbox.due((first, changed), 0.2) == []

    def test_pace_holds_back_and_does_not_forget(self) -> None:
        """A fragment with a pace waits for its time, and then comes in its latest form."""
        outbox = Outbox()
        outbox.due((Fragment("a", "1", b"1", 1.0),), 0.0)
        assert outbox.due((Fragment("a", "2", b"2", 1.0),), 0.5) == []
        assert [f.html for f in outbox.due((Fragment("a", "3", b"3", 1.0),), 1.0)] == ["3"]

    def test_covered_fragments_are_not_sent_twice(self) -> None:
        """What comes inside another fragment counts as sent."""
        outbox = Outbox()
        listing, card = Fragment("list", "<a/>", b"a", covers=("a",)), Fragment("a", "1", b"1")
        assert outbox.due((listing, card), 0.0) == [listing]
        assert outbox.due((listing, Fragment("a", "2", b"2")), 0.1) == [Fragment("a", "2", b"2")]


class TestChartFeed:
    """
    What the chart of one stream gets.
    """

    def test_series_then_points(self) -> None:
        """The whole series comes once, then what is new."""
        feed = ChartFeed()
        first = feed.advance(Series([1.0, 2.0], ["pp0"], [[0.0, 1.0]]))
        assert first is not None
        assert first.name == "series"
        assert feed.advance(Series([1.0, 2.0], ["pp0"], [[0.0, 1.0]])) is None
        more = feed.advance(Series([1.0, 2.0, 3.0], ["pp0"], [[0.0, 1.0, 4.0]]))
        assert more is not None
        assert (more.name, more.series.times_unix, more.series.values) == ("points", [3.0], [[4.0]])

    def test_newest_point_grows(self) -> None:
        """The newest point comes again when it has changed."""
        feed = ChartFeed()
        feed.advance(Series([1.0, 2.0], ["pp0"], [[0.0, 1.0]]))
        again = feed.advance(Series([1.0, 2.0], ["pp0"], [[0.0, 5.0]]))
        assert again is not None
        assert (again.series.times_unix, again.series.values) == ([2.0], [[5.0]])

    def test_another_rank_begins_anew(self) -> None:
        """When ranks come or go the whole series is sent."""
        feed = ChartFeed()
        feed.advance(Series([1.0], ["pp0"], [[0.0]]))
        event = feed.advance(Series([1.0], ["pp0", "pp1"], [[0.0], [0.0]]))
        assert event is not None
        assert event.name == "series"


def test_series_begins_with_the_first_sample() -> None:
    """The time before anything was known is left out; a gap later on is not."""
    series = Series([1.0, 2.0, 3.0, 4.0], ["pp0", "pp1"], [[None, None, None, 2.0], [None, 0.0, None, 0.0]])
    shown = from_first_sample(series)
    assert (shown.times_unix, shown.values) == ([2.0, 3.0, 4.0], [[None, None, 2.0], [0.0, None, 0.0]])
    assert from_first_sample(Series([1.0], ["pp0"], [[None]])) == Series([], ["pp0"], [[]])


def test_long_ids_keep_both_ends() -> None:
    """Engine ids that begin alike can be told apart."""
    assert words.short_engine("baseline-b4cab5") == "baseline-b4cab5"
    assert words.short_engine("7c1d90e2-b44f-4be0-9d0f-1a2b3c4d5e6f") == "7c1d90e2\N{HORIZONTAL ELLIPSIS}5e6f"


def test_announcements() -> None:
    """A change of state is said; what a page says already is not."""
    assert announce({}, {"a": "wedged"}) == []
    assert announce({"a": "healthy", "b": "idle"}, {"a": "drifting", "b": "idle"}) == ["a is now drifting."]


def test_announcements_of_a_list_that_grows() -> None:
    """What is new in a list is said, after the first look; what is called alike is told apart by its id."""
    first = {"i-1": ("drift on a", "open")}
    assert announce_all(None, first) == []
    assert announce_all(first, {"i-1": ("drift on a", "recovered"), "i-2": ("drift on a", "open")}) == [
        "drift on a is now recovered.",
        "New: drift on a, open.",
    ]
