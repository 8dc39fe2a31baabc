"""
One live stream per page: changed fragments, chart points, a heartbeat, and what a screen reader should say.

Unnamed events carry fragments, each wrapped so that htmx morphs it into its place. Named events reach the page's script:
`heartbeat`, `series` and `points` (chart), `announce` (a sentence), `gone` (the engine is no longer known).
"""

from collections.abc import AsyncIterable, Iterable
from typing import Any

import anyio
from fastapi import APIRouter, Depends, HTTPException, status
from fastapi.sse import EventSourceResponse, ServerSentEvent

from rankscope_server.domain.model import State
from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.chart_feed import ChartFeed
from rankscope_server.web.live import Fragment, LiveFragments, Outbox
from rankscope_server.web.words import short_engine

PACE_SECONDS = 0.25
"""
Least time between two looks: changes that come faster are sent together.
"""
HEARTBEAT_SECONDS = 1.0
"""
Longest silence of a stream that is alive.
"""


def create_stream_router(rankscope: Rankscope, live: LiveFragments) -> APIRouter:
    """
    The routes under `/live`.
    """
    router = APIRouter(prefix="/live", include_in_schema=False)

    @router.get("/fleet", response_class=EventSourceResponse)
    async def fleet() -> AsyncIterable[ServerSentEvent]:
        outbox, states = Outbox(), dict[str, State]()
        async for version in _ticks(rankscope):
            view, fragments = live.fleet()
            for event in _fragment_events(outbox, fragments):
                yield event
            now = {card.name: card.state for card in view.deployments}
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
        outbox, feed, states = Outbox(), ChartFeed(), dict[str, State]()
        name = f"{deployment} {short_engine(engine)}"
        async for version in _ticks(rankscope):
            rendered = await live.engine(deployment, engine)
            if rendered is None:
                yield ServerSentEvent(event="gone", raw_data=f"Engine {name} is no longer known.")
                return
            for event in _fragment_events(outbox, rendered.fragments):
                yield event
            points = feed.advance(rendered.series)
            if points is not None:
                series = points.series
                yield ServerSentEvent(
                    event=points.name,
                    data={"times": series.times_unix, "labels": series.labels, "values": series.values},
                )
            now = {name: rendered.view.state}
            for sentence in announce(states, now):
                yield ServerSentEvent(event="announce", raw_data=sentence)
            states = now
            yield _heartbeat(version, rendered.view.data_age_seconds)

    return router


def announce(before: dict[str, State], now: dict[str, State]) -> list[str]:
    """
    What changed, in sentences to be read aloud. A first look announces nothing: the page says it already.
    """
    return [
        f"{name} is now {state.label}." for name, state in now.items() if name in before and before[name] is not state
    ]


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
