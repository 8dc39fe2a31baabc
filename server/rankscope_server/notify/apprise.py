"""
The many services that apprise knows: messengers, mail, pagers.
"""

import hashlib
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from rankscope_server.alert_settings import ReceiverSettings
from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_notice import Links, Notice
from rankscope_server.domain.model import Severity
from rankscope_server.notify.receiver import DeliveryError
from rankscope_server.settings import ConfigError, read_private_text

if TYPE_CHECKING:
    from apprise import NotifyBase

THREADS = 8
"""
Threads for the addresses of a receiver: one that hangs holds its own until apprise gives up.
"""


class Apprise:
    """
    One address of apprise. It is told by a thread, as apprise waits for answers.
    """

    kind = "apprise"
    batch = 1
    remind_seconds = None

    def __init__(
        self, name: str, service: "NotifyBase", timeout_seconds: float, links: Links, limiter: anyio.CapacityLimiter
    ) -> None:
        self.name = name
        self.where = shown_service(service)
        self._service = service
        self._timeout = timeout_seconds
        self._links = links
        self._limiter = limiter
        self._busy = threading.Lock()

    async def send(self, notices: Sequence[Notice], now_unix: float) -> None:
        """
        Send a notice as a message.

        Raises:
            DeliveryError: it was not taken.

        """
        del now_unix
        for notice in notices:
            if self._busy.locked():
                msg = "it still waits for the answer to the last message: see that the service can be reached from here"
                raise DeliveryError(msg, reached=False)
            try:
                with anyio.fail_after(self._timeout):
                    taken = await to_thread.run_sync(
                        self._notify, notice, abandon_on_cancel=True, limiter=self._limiter
                    )
            except TimeoutError as error:
                msg = f"no answer within {self._timeout:g} s: see that the service can be reached from here"
                raise DeliveryError(msg, reached=False) from error
            if not taken:
                msg = "the service did not take it: see that its address and tokens are right, and that it can be reached from here"
                raise DeliveryError(msg, reached=False)

    def _notify(self, notice: Notice) -> bool:
        text, kind = build_text(notice, self._links), message_type(notice)
        with self._busy:
            try:
                return bool(self._service.notify(title=notice.title, body=text, notify_type=kind))
            except Exception:  # noqa: BLE001  its text may hold the address, and so a token
                return False

    async def close(self) -> None:
        """
        Nothing is held.
        """


def create_apprises(settings: ReceiverSettings, links: Links) -> Iterator[Apprise]:
    """
    One receiver for each address of apprise in the settings.

    Raises:
        ConfigError: an address is not understood, or the file cannot be used.

    """
    urls = [url.get_secret_value() for url in settings.apprise]
    where = f"receiver {settings.name}: apprise"
    if settings.apprise_file is not None:
        where = f"receiver {settings.name}: {settings.apprise_file}"
        text = read_private_text(settings.apprise_file, f"receiver {settings.name}: apprise file")
        urls = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        if not urls:
            msg = f"{where} holds no address: write one a line, like mailto://user:password@host"
            raise ConfigError(msg)
    if not urls:
        return
    limiter = anyio.CapacityLimiter(THREADS)
    for number, url in enumerate(dict.fromkeys(urls), 1):
        service = parse_service(url)
        if service is None:
            msg = f"{where}, address {number}: apprise does not understand it; it begins with the name of a service, like mailto:// or slack://"
            raise ConfigError(msg)
        name = settings.name
        if len(urls) > 1:
            name = f"{name} {url.partition(':')[0]}-{hashlib.sha256(url.encode()).hexdigest()[:6]}"
        yield Apprise(name, service, settings.timeout_seconds, links, limiter)


def parse_service(url: str) -> "NotifyBase | None":
    """
    The service behind an address; None if apprise knows none.
    """
    import apprise  # noqa: PLC0415  it takes long to load, and most have no use for it

    # What it logs may hold tokens, and whether a message was taken is told by its answer.
    logging.getLogger("apprise").propagate = False
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it loads all that it has, most of which nobody uses
        service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
    return service if isinstance(service, apprise.NotifyBase) else None


def shown_service(service: "NotifyBase") -> str:
    """
    An address without secrets, as apprise shows it: nothing after the place that it names.
    """
    return str(service.url(privacy=True)).partition("?")[0]  # type: ignore[no-untyped-call]


def message_type(notice: Notice) -> str:
    """
    The kind of message, which services show as a colour or a sign.
    """
    if notice.change is Change.RESOLVED:
        return "success" if notice.all_clear else "info"
    return "failure" if notice.severity is Severity.CRITICAL else "warning"


def build_text(notice: Notice, links: Links) -> str:
    """
    A message for people.
    """
    parts = [
        notice.summary,
        notice.description if notice.change is not Change.RESOLVED else notice.ending,
        links.incident(notice.incident) or links.page(notice.deployment, notice.engine),
        links.runbook(notice.name) if notice.change is not Change.RESOLVED else "",
    ]
    return "\n\n".join(part for part in parts if part)
