"""
One live stream per page: changed fragments, chart points, a heartbeat, and what a screen reader should say.

Unnamed events carry fragments, each wrapped so that htmx morphs it into its place. Named events reach the page's script:
`heartbeat`, `series` and `points` (chart), `announce` (a sentence), `gone` (what the page shows is no longer known).
"""

from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any

import anyio
from fastapi import APIRouter, Depends, HTTPException, status
from fastapi.sse import EventSourceResponse, ServerSentEvent

from rankscope_server.domain.alert import AlertsView
from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.chart_feed import ChartFeed
from rankscope_server.web.counts import LiveCounts
from rankscope_server.web.fragments import Fragment, Outbox
from rankscope_server.web.live import LiveFragments
from rankscope_server.web.live_alerts import LiveAlerts
from rankscope_server.web.live_incidents import LiveIncidents
from rankscope_server.web.words import receiver_state, short_engine

PACE_SECONDS = 0.25
"""
Least time between two looks: changes that come faster are sent together.
"""
HEARTBEAT_SECONDS = 1.0
"""
Longest silence of a stream that is alive.
"""


def create_stream_router(
    rankscope: Rankscope, live: LiveFragments, incidents: LiveIncidents, alerts: LiveAlerts, counts: LiveCounts
) -> APIRouter:
    """
    The routes under `/live`.
    """
    router = APIRouter(prefix="/live", include_in_schema=False)

    @router.get("/fleet", response_class=EventSourceResponse)
    async def fleet() -> AsyncIterable[ServerSentEvent]:
        outbox, states = Outbox(), dict[str, str]()
        async for version in _ticks(rankscope):
            view, fragments = live.fleet()
            for event in _fragment_events(outbox, (*fragments, *await counts.fragments())):
                yield event
            now = {card.name: card.state.label for card in view.deployments}
            for sentence in announce(states, now):
                yield ServerSentEvent(event="announce", raw_data=sentence)
            states = now
            yield _heartbeat(version, None)

    def must_exist(deployment: str, engine: str) -> None:
        # Before the stream begins: once it runs its status is sent, and a stream that says 404 cannot be told apart.
        if rankscope.engine(deployment, engine) is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, "No engine of this name is known.")

    @router.get(
        "/deployments/{deployment}/engines/{engine}",
        response_class=EventSourceResponse,
        dependencies=[Depends(must_exist)],
    )
    async def engine(deployment: str, engine: str) -> AsyncIterable[ServerSentEvent]:
        outbox, feed, states = Outbox(), ChartFeed(), dict[str, str]()
        name = f"{deployment} {short_engine(engine)}"
        async for version in _ticks(rankscope):
            rendered = await live.engine(deployment, engine)
            if rendered is None:
                yield ServerSentEvent(event="gone", raw_data=f"Engine {name} is no longer known.")
                return
            for event in _fragment_events(outbox, (*rendered.fragments, *await counts.fragments())):
                yield event
            points = feed.advance(rendered.series)
            if points is not None:
                series = points.series
                yield ServerSentEvent(
                    event=points.name,
                    data={"times": series.times_unix, "labels": series.labels, "values": series.values},
                )
            now = {name: rendered.view.state.label}
            for sentence in announce(states, now):
                yield ServerSentEvent(event="announce", raw_data=sentence)
            states = now
            yield _heartbeat(version, rendered.view.data_age_seconds)

    @router.get("/incidents", response_class=EventSourceResponse)
    async def incident_list() -> AsyncIterable[ServerSentEvent]:
        outbox, lives = Outbox(), None
        async for version in _ticks(rankscope):
            cards, fragments = await incidents.listing()
            for event in _fragment_events(outbox, (*fragments, *await counts.fragments())):
                yield event
            now = {card.id: (f"{card.kind.value} on {card.deployment}", card.life.value) for card in cards}
            for sentence in announce_all(lives, now):
                yield ServerSentEvent(event="announce", raw_data=sentence)
            lives = now
            yield _heartbeat(version, None)

    async def must_be_an_incident(incident: str) -> None:
        if await rankscope.incident(incident) is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, "No incident of this id is known.")

    @router.get(
        "/incidents/{incident}", response_class=EventSourceResponse, dependencies=[Depends(must_be_an_incident)]
    )
    async def one_incident(incident: str) -> AsyncIterable[ServerSentEvent]:
        outbox, lives = Outbox(), dict[str, str]()
        async for version in _ticks(rankscope):
            rendered = await incidents.incident(incident)
            if rendered is None:
                yield ServerSentEvent(event="gone", raw_data=f"Incident {incident} is no longer kept.")
                return
            page, fragments = rendered
            for event in _fragment_events(outbox, (*fragments, *await counts.fragments())):
                yield event
            now = {f"Incident {incident}": page.view.card.life.value}
            for sentence in announce(lives, now):
                yield ServerSentEvent(event="announce", raw_data=sentence)
            lives = now
            yield _heartbeat(version, None)

    @router.get("/alerts", response_class=EventSourceResponse)
    async def alert_list() -> AsyncIterable[ServerSentEvent]:
        outbox, states = Outbox(), None
        async for version in _ticks(rankscope):
            view, fragments = await alerts.alerts()
            for event in _fragment_events(outbox, (*fragments, *await counts.fragments())):
                yield event
            now = _spoken(view)
            for sentence in announce_all(states, now):
                yield ServerSentEvent(event="announce", raw_data=sentence)
            states = now
            yield _heartbeat(version, None)

    return router


def announce(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """
    What changed, in sentences to be read aloud. A first look announces nothing: the page says it already.
    """
    return [f"{name} is now {state}." for name, state in now.items() if name in before and before[name] != state]


def announce_all(before: Mapping[str, tuple[str, str]] | None, now: Mapping[str, tuple[str, str]]) -> list[str]:
    """
    The same for a list that grows: what is new in it is said too. By id: what it is called, and how it stands.
    """
    if before is None:
        return []
    return [
        f"{name} is now {state}." if identity in before else f"New: {name}, {state}."
        for identity, (name, state) in now.items()
        if before.get(identity, ("", ""))[1] != state
    ]


def _spoken(view: AlertsView) -> dict[str, tuple[str, str]]:
    """
    What a screen reader hears of alerts: those that fire or no longer do, and receivers that fail or do so no longer.
    """
    said = {
        f"{alert.name} {alert.deployment} {alert.engine} {alert.pending_unix}": (
            f"{alert.name} on {alert.deployment}",
            alert.state.value,
        )
        for alert in (*view.active, *view.past)
    }
    return said | {
        f"receiver {receiver.name}": (f"Receiver {receiver.name}", receiver_state(receiver))
        for receiver in view.receivers
    }


def wrap_fragments(fragments: Iterable[Fragment]) -> str:
    """
    Fragments as htmx takes them: each is morphed into the element that has its id.
    """
    return "".join(
        f'<hx-partial hx-target="#{fragment.id}" hx-swap="outerMorph">{fragment.html}</hx-partial>'
        for fragment in fragments
    )


async def _ticks(rankscope: Rankscope) -> AsyncIterable[int]:
    """
    The version at once, then whenever it grows and after each heartbeat's time; ends when the server shuts down.
    """
    version = rankscope.version
    while not rankscope.closing:
        yield version
        await anyio.sleep(PACE_SECONDS)
        version = await rankscope.wait_newer(version, HEARTBEAT_SECONDS - PACE_SECONDS)


def _fragment_events(outbox: Outbox, fragments: tuple[Fragment, ...]) -> list[ServerSentEvent]:
    due = outbox.due(fragments, anyio.current_time())
    return [ServerSentEvent(raw_data=wrap_fragments(due))] if due else []


def _heartbeat(version: int, data_age_seconds: float | None) -> ServerSentEvent:
    beat: dict[str, Any] = {"version": version, "data_age_seconds": data_age_seconds}
    return ServerSentEvent(event="heartbeat", data=beat)
