"""
The counts beside the links of every page: incidents that are open, alerts that fire.
"""

from dataclasses import dataclass

from rankscope_server.domain.alert import AlertState
from rankscope_server.domain.incident import IncidentCard, IncidentLife
from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.fragments import Fragment, make_fragment
from rankscope_server.web.templating import Templates

INCIDENT_ROWS = 100
"""
Incidents that the list shows, and that are counted: open ones come first.
"""
OVER = {IncidentLife.RECOVERED, IncidentLife.CLOSED}


@dataclass(frozen=True, slots=True)
class Counts:
    """
    What needs somebody, whichever page is open.
    """

    incidents: int | None
    """Incidents that go on; None where it is not known."""
    alerts: int | None
    """Alerts that fire; None where it is not known."""


UNKNOWN_COUNTS = Counts(None, None)
"""
For pages about an error in the server itself, which must not ask it for more.
"""


class LiveCounts:
    """
    Counts once per version, however many pages and streams ask.
    """

    def __init__(self, rankscope: Rankscope, templates: Templates) -> None:
        self._rankscope = rankscope
        self._templates = templates
        self._kept: tuple[int, Counts, tuple[Fragment, ...]] | None = None

    async def now(self) -> Counts:
        """
        The counts of this moment.
        """
        return (await self._current())[1]

    async def fragments(self) -> tuple[Fragment, ...]:
        """
        The counts as the links carry them.
        """
        return (await self._current())[2]

    async def _current(self) -> tuple[int, Counts, tuple[Fragment, ...]]:
        version = self._rankscope.version
        kept = self._kept
        if kept is None or kept[0] != version:
            incidents = await self._rankscope.incidents(INCIDENT_ROWS)
            active = (await self._rankscope.alerts()).active
            counts = Counts(
                incidents=sum(goes_on(card) for card in incidents),
                alerts=sum(alert.state is AlertState.FIRING for alert in active),
            )
            fragments = kept[2] if kept is not None and kept[1] == counts else self._render(counts)
            kept = self._kept = (version, counts, fragments)
        return kept

    def _render(self, counts: Counts) -> tuple[Fragment, ...]:
        return tuple(
            make_fragment(f"count-{name}", self._templates.block("base.html", f"{name}_count", counts=counts))
            for name in ("incidents", "alerts")
        )


def goes_on(card: IncidentCard) -> bool:
    """
    Whether something of an incident still holds.
    """
    return card.life not in OVER
