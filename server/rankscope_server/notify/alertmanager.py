"""
Alertmanager, by its API of version 2: it routes, groups and silences.
"""

import json
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx2

from rankscope_server.alert_settings import ReceiverSettings
from rankscope_server.domain.alert_notice import Links, Notice, as_warning, iso_time
from rankscope_server.notify.http import HttpSender, shown_url

PATH = "/api/v2/alerts"
REMIND_SECONDS = 60.0
"""
How often alerts that fire are sent again: one that was restarted learns of them.
"""
LIFE_SECONDS = 240.0
"""
How long it takes an alert for firing without being told again: some reminders may be lost.
"""


class Alertmanager:
    """
    One instance.
    """

    kind = "alertmanager"
    batch = 64
    remind_seconds = REMIND_SECONDS

    def __init__(
        self,
        settings: ReceiverSettings,
        url: str,
        links: Links,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        alone = len(settings.alertmanager) == 1
        self.name = settings.name if alone else f"{settings.name} {urlsplit(url).netloc}{urlsplit(url).path}"
        self.where = shown_url(url, path=True)
        self._links = links
        self._sender = HttpSender(settings, f"{url}{PATH}", proxied=False, transport=transport)

    async def send(self, notices: Sequence[Notice], now_unix: float) -> None:
        """
        Put alerts.

        Raises:
            DeliveryError: it did not take them.

        """
        alerts = []
        for notice in notices:
            milder = as_warning(notice)
            alerts += [build_alert(one, self._links, now_unix) for one in (milder, notice) if one is not None]
        await self._sender.post(json.dumps(alerts).encode(), {})

    async def close(self) -> None:
        """
        Let go of connections.
        """
        await self._sender.close()


def build_alert(notice: Notice, links: Links, now_unix: float) -> dict[str, object]:
    """
    An alert as Alertmanager takes it. One that fires ends in a while unless it is sent again; one that is resolved has
    ended, at the latest now: by a wall clock that jumped it would fire on.
    """
    end = now_unix + LIFE_SECONDS
    start = min(notice.fired_unix, now_unix)
    if notice.resolved_unix is not None:
        end = max(start, min(notice.resolved_unix, now_unix))
    page = links.page(notice.deployment, notice.engine)
    annotations = {
        "summary": notice.summary,
        "description": notice.description,
        "runbook_url": links.runbook(notice.name),
        "page_url": page,
        "incident": notice.incident,
        "incident_url": links.incident(notice.incident),
    }
    alert: dict[str, object] = {
        "labels": notice.labels,
        "annotations": {name: value for name, value in annotations.items() if value},
        "startsAt": iso_time(start),
        "endsAt": iso_time(end),
    }
    return alert | ({"generatorURL": page} if page else {})
