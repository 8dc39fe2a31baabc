"""Queues of receivers, and who is told."""

import dataclasses

from made_ranks import START_UNIX

from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_notice import Links, Notice, as_warning, tried
from rankscope_server.domain.alert_outbox import (
    GIVE_UP_SECONDS,
    LIMIT,
    LONGEST_RETRY_SECONDS,
    RESOLVED_GIVE_UP_SECONDS,
    admit,
    give_up,
    next_due,
    plan_next,
    refused,
    retry_seconds,
    taken,
)
from rankscope_server.domain.alert_routes import Route, plan_deliveries
from rankscope_server.domain.model import Severity


def made_notice(alert="a", change=Change.FIRING, **fields) -> Notice:
    made = tried(alert, change, Severity.CRITICAL, START_UNIX, START_UNIX)
    return dataclasses.replace(made, id=f"{alert}-{change.value}", alert=alert, **fields)


def queue_of(*notices, now=0.0):
    queue = ()
    for notice in notices:
        queue, _ = admit(queue, notice, now)
    return queue


def test_notices_of_one_alert_go_in_order_and_others_do_not_wait():
    """The end of an alert is not sent before its beginning."""
    queue = queue_of(made_notice("a"), made_notice("a", Change.RESOLVED), made_notice("b"))
    assert [n.id for n in plan_next(queue, 0.0, batch=10)] == ["a-firing", "b-firing"]
    queue = refused(queue, [made_notice("a")], 0.0, reached=True)
    assert [n.id for n in plan_next(queue, 0.0, batch=10)] == ["b-firing"]
    queue = taken(queue, [made_notice("b")], 0.1)
    assert [n.id for n in plan_next(queue, 0.1, batch=10)] == ["a-firing"]
    queue = taken(queue, [made_notice("a")], 0.2)
    assert [n.id for n in plan_next(queue, 0.2, batch=10)] == ["a-resolved"]


def test_a_receiver_that_is_not_reached_is_left_alone_for_a_while():
    """One that refuses one notice takes another; what failed goes alone then."""
    queue = queue_of(made_notice("a"), made_notice("b"), made_notice("c"))
    apart = refused(queue, [made_notice("a")], 1.0, reached=False)
    assert plan_next(apart, 1.1, batch=10) == ()
    assert next_due(apart) == 1.5
    assert plan_next(apart, 1.6, batch=10) == (made_notice("a"),)


def test_pauses_grow_to_a_limit():
    """Half a second, then twice as long each time."""
    assert [retry_seconds(n) for n in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert retry_seconds(1000) == LONGEST_RETRY_SECONDS


def test_what_came_and_went_unheard_is_given_up_in_the_end():
    """Beginning and end together; what still fires never is."""
    queue = queue_of(made_notice("a"), made_notice("b"), made_notice("b", Change.RESOLVED), now=0.0)
    kept, dropped = give_up(queue, GIVE_UP_SECONDS - 1)
    assert dropped == ()
    kept, dropped = give_up(queue, GIVE_UP_SECONDS)
    assert [waiting.notice.id for waiting in dropped] == ["b-firing", "b-resolved"]
    assert [waiting.notice.id for waiting in kept] == ["a-firing"]


def test_the_end_of_a_known_alert_is_worth_more_patience():
    """Somebody waits for it."""
    queue = queue_of(made_notice("a", Change.RESOLVED), now=0.0)
    assert give_up(queue, GIVE_UP_SECONDS)[1] == ()
    assert len(give_up(queue, RESOLVED_GIVE_UP_SECONDS)[1]) == 1


def test_a_full_queue_makes_room_by_whole_alerts():
    """The newest is always in; alerts that nobody was told of go first."""
    queue = queue_of(made_notice("known", Change.RESOLVED), made_notice("old"), made_notice("old", Change.RESOLVED))
    for number in range(LIMIT - 3):
        queue, dropped = admit(queue, made_notice(f"n{number}"), 1.0)
        assert dropped == ()
    queue, dropped = admit(queue, made_notice("newest"), 2.0)
    assert [waiting.notice.id for waiting in dropped] == ["old-firing", "old-resolved"]
    assert {"newest-firing", "known-resolved"} <= {waiting.notice.id for waiting in queue}


def test_receivers_hear_of_what_is_for_them():
    """By severity and deployment; a receiver does not hear that it fails itself."""
    critical = Route("pager", severities=frozenset({Severity.CRITICAL}))
    chat = Route("chat", deployments=frozenset({"chat"}))
    notice = made_notice(severity=Severity.WARNING, deployment="chat")
    assert not critical.wants(notice)
    assert chat.wants(notice)
    assert not chat.wants(made_notice(deployment="other"))
    assert chat.wants(made_notice(deployment="", subject="pager"))
    assert not chat.wants(made_notice(deployment="", subject="chat"))


def test_who_knows_of_an_alert_hears_how_it_ends():
    """Also if it got too loud for it meanwhile; whoever it is loud enough for now hears of it as of a new one."""
    warnings = Route("tickets", severities=frozenset({Severity.WARNING}))
    critical = Route("pager", severities=frozenset({Severity.CRITICAL}))
    worse = made_notice(change=Change.WORSE, before=Severity.WARNING)
    deliveries = plan_deliveries(worse, [warnings, critical], {"tickets"})
    assert [(name, notice.change) for name, notice in deliveries] == [
        ("tickets", Change.WORSE),
        ("pager", Change.FIRING),
    ]
    over = made_notice(change=Change.RESOLVED)
    assert [name for name, _ in plan_deliveries(over, [warnings, critical], {"tickets"})] == ["tickets"]


def test_an_alert_that_got_worse_ends_as_what_it_was():
    """For receivers to whom another severity is another alert."""
    worse = made_notice(change=Change.WORSE, before=Severity.WARNING)
    milder = as_warning(worse)
    assert (milder.change, milder.severity, milder.resolved_unix) == (
        Change.RESOLVED,
        Severity.WARNING,
        worse.at_unix,
    )
    assert as_warning(made_notice()) is None


def test_links_lead_to_pages_of_this_server_or_to_runbooks_of_others():
    """Names are quoted; what is not known is left out."""
    links = Links("https://rankscope.example", "https://wiki.example/{name}.html")
    assert links.page("chat", "e/1") == "https://rankscope.example/deployments/chat/engines/e%2F1"
    assert links.runbook("RankscopeDrift") == "https://wiki.example/RankscopeDrift.html"
    assert Links("https://r.example").runbook("RankscopeDrift") == "https://r.example/runbooks/RankscopeDrift"
    assert (Links().page("chat", "e1"), Links().runbook("RankscopeDrift"), Links().incident("i")) == ("", "", "")
