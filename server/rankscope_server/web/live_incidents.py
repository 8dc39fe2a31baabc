"""
The fragments of the pages about incidents.
"""

from collections import OrderedDict

from rankscope_server.domain.incident import IncidentCard
from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.counts import INCIDENT_ROWS, goes_on
from rankscope_server.web.fragments import Fragment, make_fragment
from rankscope_server.web.incident_page import IncidentPage, read_incident
from rankscope_server.web.templating import Templates

KEPT_INCIDENTS = 64
INCIDENT_FRAGMENTS = ("headline", "findings", "timeline", "captures", "history")
"""
Blocks of an incident's page that live.
"""

Cards = tuple[IncidentCard, ...]


class LiveIncidents:
    """
    Renders fragments, once per version and only where what they show has changed.
    """

    def __init__(self, rankscope: Rankscope, templates: Templates) -> None:
        self._rankscope = rankscope
        self._templates = templates
        self._list: tuple[int, Cards, tuple[Fragment, ...]] | None = None
        self._pages: OrderedDict[str, tuple[int, IncidentPage, tuple[Fragment, ...]]] = OrderedDict()

    async def listing(self) -> tuple[Cards, tuple[Fragment, ...]]:
        """
        The list of incidents.
        """
        version, kept = self._rankscope.version, self._list
        if kept is None or kept[0] != version:
            cards = await self._rankscope.incidents(INCIDENT_ROWS)
            fragments = kept[2] if kept is not None and kept[1] == cards else self._render_list(cards)
            kept = self._list = (version, cards, fragments)
        return kept[1], kept[2]

    async def incident(self, incident: str) -> tuple[IncidentPage, tuple[Fragment, ...]] | None:
        """
        The page of an incident; None where no such one is known (any more).
        """
        version, kept = self._rankscope.version, self._pages.get(incident)
        if kept is None or kept[0] != version:
            page = await read_incident(self._rankscope, incident)
            if page is None:
                self._pages.pop(incident, None)
                return None
            fragments = self._render_page(page)
            kept = self._pages[incident] = (version, page, fragments)
            self._pages.move_to_end(incident)
            if len(self._pages) > KEPT_INCIDENTS:
                self._pages.popitem(last=False)
        return kept[1], kept[2]

    def _render_list(self, cards: Cards) -> tuple[Fragment, ...]:
        html = self._templates.block("incidents.html", "incidents", **list_context(cards))
        return (make_fragment("incidents", html),)

    def _render_page(self, page: IncidentPage) -> tuple[Fragment, ...]:
        return tuple(
            make_fragment(f"incident-{name}", self._templates.block("incident.html", name, shown=page))
            for name in INCIDENT_FRAGMENTS
        )


def list_context(cards: Cards) -> dict[str, object]:
    """
    What the template of the list gets.
    """
    return {
        "open": tuple(card for card in cards if goes_on(card)),
        "past": tuple(card for card in cards if not goes_on(card)),
        "limit": INCIDENT_ROWS,
        "cut": len(cards) >= INCIDENT_ROWS,
    }
