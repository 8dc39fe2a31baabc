"""
The fragments of the alerts page.
"""

from rankscope_server.domain.alert import AlertsView
from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.fragments import Fragment, make_fragment
from rankscope_server.web.templating import Templates

ALERT_FRAGMENTS = ("summary", "active", "receivers", "past")
"""
Blocks of the alerts page that live.
"""


class LiveAlerts:
    """
    Renders fragments, once per version and only where what they show has changed.
    """

    def __init__(self, rankscope: Rankscope, templates: Templates) -> None:
        self._rankscope = rankscope
        self._templates = templates
        self._kept: tuple[int, AlertsView, tuple[Fragment, ...]] | None = None

    async def alerts(self) -> tuple[AlertsView, tuple[Fragment, ...]]:
        """
        The alerts page.
        """
        version, kept = self._rankscope.version, self._kept
        if kept is None or kept[0] != version:
            view = await self._rankscope.alerts()
            fragments = kept[2] if kept is not None and kept[1] == view else self._render(view)
            kept = self._kept = (version, view, fragments)
        return kept[1], kept[2]

    def _render(self, view: AlertsView) -> tuple[Fragment, ...]:
        return tuple(
            make_fragment(f"alerts-{name}", self._templates.block("alerts.html", name, view=view))
            for name in ALERT_FRAGMENTS
        )
