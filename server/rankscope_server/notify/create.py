"""
Makes receivers of settings.
"""

from collections.abc import Iterable, Iterator

import httpx2

from rankscope_server.alert_settings import ReceiverSettings
from rankscope_server.domain.alert_notice import Links
from rankscope_server.domain.alert_routes import Route
from rankscope_server.notify.alertmanager import Alertmanager
from rankscope_server.notify.apprise import create_apprises
from rankscope_server.notify.receiver import Receiver
from rankscope_server.notify.webhook import Webhook


def create_receivers(
    settings: Iterable[ReceiverSettings], links: Links, *, transport: httpx2.AsyncBaseTransport | None = None
) -> tuple[tuple[Receiver, Route], ...]:
    """
    Every receiver, and what it wants to hear of: each instance of Alertmanager and each address of apprise is one of its
    own, so that none waits for another. `transport` reaches those of HTTP.

    Raises:
        ConfigError: an address or a file of a receiver cannot be used.

    """
    return tuple(
        (made, Route(made.name, frozenset(receiver.severities), frozenset(receiver.deployments)))
        for receiver in settings
        for made in _instances(receiver, links, transport)
    )


def _instances(
    settings: ReceiverSettings, links: Links, transport: httpx2.AsyncBaseTransport | None
) -> Iterator[Receiver]:
    for url in dict.fromkeys(settings.alertmanager):
        yield Alertmanager(settings, url, links, transport=transport)
    if settings.webhook is not None:
        yield Webhook(settings, links, transport=transport)
    yield from create_apprises(settings, links)
