"""
The fragments of a live page, rendered once per version however many people watch.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from rankscope_server.domain.model import DeploymentCard, EngineCard, EngineView, FleetView, Series, State
from rankscope_server.domain.outlook import Outlook
from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.drift_table import tabulate_drift
from rankscope_server.web.fragments import Fragment, digest, make_fragment
from rankscope_server.web.guidance import order_by_need, summarise
from rankscope_server.web.links import element_id
from rankscope_server.web.recent import recent_series
from rankscope_server.web.templating import Templates

KEPT_PAGES = 256
CARD_SECONDS = 1.0
"""
Time for which a card of the fleet page may lag behind in figures; never in anything that `urgent` names.
"""

Kept = TypeVar("Kept")

ENGINE_FRAGMENTS = {
    "headline": 0.0,
    "findings": 0.0,
    "fix": 0.0,
    "drift_note": 0.0,
    "strip": 1.0,
    "drift_table": 1.0,
    "requests": 1.0,
    "ranks": 1.0,
    "history": 1.0,
}
"""
Blocks of the engine page that live, with the least time between two sendings (s): what is urgent is never held back.
"""


@dataclass(frozen=True, slots=True)
class RenderedCard:
    """
    A card of the fleet page with what it was rendered from.
    """

    card: DeploymentCard
    at_unix: float
    fragment: Fragment


@dataclass(frozen=True, slots=True)
class EngineFragments:
    """
    What a stream of an engine page sends.
    """

    view: EngineView
    series: Series
    fragments: tuple[Fragment, ...]


class LiveFragments:
    """
    Renders fragments, and keeps those of the latest version of each page.
    """

    def __init__(self, rankscope: Rankscope, templates: Templates) -> None:
        self._rankscope = rankscope
        self._templates = templates
        self._fleet: tuple[int, tuple[FleetView, tuple[Fragment, ...]]] | None = None
        self._cards: dict[str, RenderedCard] = {}
        self._engines: OrderedDict[tuple[str, str], tuple[int, EngineFragments]] = OrderedDict()
        self._series: OrderedDict[tuple[str, str], tuple[int, Series]] = OrderedDict()

    def fleet(self) -> tuple[FleetView, tuple[Fragment, ...]]:
        """
        The fleet page.
        """
        version = self._rankscope.version
        if self._fleet is None or self._fleet[0] != version:
            view = self._rankscope.fleet()
            self._fleet = (version, (view, self._render_fleet(view)))
        return self._fleet[1]

    async def engine(self, deployment: str, engine: str) -> EngineFragments | None:
        """
        The page of an engine; None where it is not known (any more).
        """
        key = (deployment, engine)
        series = await self.series(deployment, engine)
        version = self._rankscope.version
        kept = self._engines.get(key)
        if kept is not None and kept[0] == version and kept[1].series is series:
            return kept[1]
        view = self._rankscope.engine(deployment, engine)
        if view is None:
            return None
        rendered = EngineFragments(view, series, self._render_engine(view, series))
        _keep(self._engines, key, (version, rendered))
        return rendered

    async def series(self, deployment: str, engine: str) -> Series:
        """
        What the chart shows, asked for once a second at most.
        """
        key = (deployment, engine)
        second = int(self._rankscope.fleet().now_unix)
        kept = self._series.get(key)
        if kept is not None and kept[0] == second:
            return kept[1]
        series = await recent_series(self._rankscope, deployment, engine)
        _keep(self._series, key, (second, series))
        return series

    def fleet_cards(self) -> dict[str, Markup]:
        """
        The cards of the fleet page by deployment, as they were rendered last: a page need not render them again.
        """
        self.fleet()
        return self._card_markup()

    def _card_markup(self) -> dict[str, Markup]:
        # Our own templates made them, with everything in them escaped.
        return {name: Markup(card.fragment.html) for name, card in self._cards.items()}  # noqa: S704

    def _render_fleet(self, view: FleetView) -> tuple[Fragment, ...]:
        ordered = order_by_need(view.deployments)
        self._cards = {card.name: self._render_card(card, view.now_unix) for card in ordered}
        cards = tuple(rendered.fragment for rendered in self._cards.values())
        summary = self._templates.block("fleet.html", "summary", summary=summarise(view), problems=view.problems)
        listing = self._templates.block("fleet.html", "deployments", deployments=ordered, rendered=self._card_markup())
        order = "\n".join(card.id for card in cards)
        return (
            make_fragment("fleet-summary", summary),
            Fragment("fleet-deployments", listing, digest(order), covers=tuple(card.id for card in cards)),
            *cards,
        )

    def _render_card(self, card: DeploymentCard, now_unix: float) -> "RenderedCard":
        kept = self._cards.get(card.name)
        if kept is not None and (
            kept.card == card or (0 <= now_unix - kept.at_unix < CARD_SECONDS and not urgent(kept.card, card))
        ):
            return kept
        html = self._templates.block("fleet.html", "deployment", card=card)
        return RenderedCard(card, now_unix, make_fragment(element_id("deployment", card.name), html))

    def _render_engine(self, view: EngineView, series: Series) -> tuple[Fragment, ...]:
        context = {"view": view, "table": tabulate_drift(series)}
        return tuple(
            make_fragment(
                f"engine-{name.replace('_', '-')}", self._templates.block("engine.html", name, **context), pace
            )
            for name, pace in ENGINE_FRAGMENTS.items()
        )


def urgent(before: DeploymentCard, now: DeploymentCard) -> bool:
    """
    Whether a card has changed in a way that is shown at once: state, problems, fix, which engines there are and how
    they stand.
    """
    return any(
        getattr(before, name) != getattr(now, name) for name in ("state", "problems", "fix_state", "unknown_code")
    ) or [_standing(engine) for engine in before.engines] != [_standing(engine) for engine in now.engines]


def _standing(engine: EngineCard) -> tuple[str, State, Outlook, str]:
    return engine.engine, engine.state, engine.forecast.outlook, engine.incident


def _keep(kept: OrderedDict[tuple[str, str], Kept], key: tuple[str, str], value: Kept) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT_PAGES:
        kept.popitem(last=False)
