"""
Makes the desk of settings.
"""

from collections.abc import Callable

from rankscope_server.alerting.desk import AlertDesk
from rankscope_server.domain.alert_notice import Links
from rankscope_server.ingest.clock import Clock
from rankscope_server.notify.create import create_receivers
from rankscope_server.settings import ServerSettings


def create_links(settings: ServerSettings) -> Links:
    """
    Where alerts point to.
    """
    return Links(settings.external_url, settings.alerts.runbook_url or "")


def create_desk(settings: ServerSettings, *, clock: Clock, changed: Callable[[], None]) -> AlertDesk:
    """
    The desk, with a channel for each receiver; `changed` is called when something that a page shows has changed.

    Raises:
        ConfigError: an address or a file of a receiver cannot be used.

    """
    links = create_links(settings)
    return AlertDesk(
        create_receivers(settings.receivers, links),
        clock,
        deployments={deployment.name for deployment in settings.deployments},
        timings=settings.alerts.timings,
        links=links,
        within_seconds=settings.alerts.forecast_minutes * 60,
        retention_seconds=settings.retention_days * 86400,
        changed=changed,
    )
