"""
A webhook: JSON, signed as Standard Webhooks are, so that its receiver knows who sent it and recognises what came twice.
"""

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from pathlib import Path

import httpx2

from rankscope_server.alert_settings import ReceiverSettings
from rankscope_server.domain.alert_notice import Links, Notice, iso_time
from rankscope_server.notify.http import HttpSender, shown_url
from rankscope_server.settings import ConfigError, read_private_text

SCHEMA_VERSION = 1
"""
Raised with each change of the body that those who read it cannot live with.
"""
PREFIX = "whsec_"


class Webhook:
    """
    One address that takes every change of an alert as a request of its own.
    """

    kind = "webhook"
    batch = 1
    remind_seconds = None

    def __init__(
        self,
        settings: ReceiverSettings,
        links: Links,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        assert settings.webhook is not None
        assert settings.secret_file is not None
        url = settings.webhook.get_secret_value()
        self.name = settings.name
        self.where = shown_url(url, path=False)
        self._links = links
        self._key = read_secret(settings.secret_file, settings.name)
        self._sender = HttpSender(settings, url, proxied=True, transport=transport)

    async def send(self, notices: Sequence[Notice], now_unix: float) -> None:
        """
        Post a notice.

        Raises:
            DeliveryError: it was not taken.

        """
        for notice in notices:
            body = json.dumps(build_body(notice, self._links)).encode()
            await self._sender.post(body, sign(self._key, notice.id, int(now_unix), body))

    async def close(self) -> None:
        """
        Let go of connections.
        """
        await self._sender.close()


def build_body(notice: Notice, links: Links) -> dict[str, object]:
    """
    A notice as JSON.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "type": f"alert.{notice.change.value}",
        "timestamp": iso_time(notice.at_unix),
        "data": {
            "alert": notice.alert,
            "number": notice.number,
            "test": notice.test,
            "labels": notice.labels,
            "summary": notice.summary,
            "description": notice.description,
            "fired_at": iso_time(notice.fired_unix),
            "resolved_at": None if notice.resolved_unix is None else iso_time(notice.resolved_unix),
            "severity_before": None if notice.before is None else notice.before.value,
            "incident": notice.incident or None,
            "page_url": links.page(notice.deployment, notice.engine) or None,
            "incident_url": links.incident(notice.incident) or None,
            "runbook_url": links.runbook(notice.name) or None,
        },
    }


def sign(key: bytes, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """
    The headers that show who sent a body, and when: a receiver refuses old ones, and ids that it has seen.
    """
    digest = hmac.new(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def make_secret() -> str:
    """
    A new secret, as it goes into a file on both sides.
    """
    return f"{PREFIX}{base64.b64encode(secrets.token_bytes(32)).decode()}"


def read_secret(path: Path, receiver: str) -> bytes:
    """
    The key in the file of a secret.

    Raises:
        ConfigError: it cannot be used.

    """
    text = read_private_text(path, f"receiver {receiver}: secret file").splitlines()[0].strip()
    try:
        key = base64.b64decode(text.removeprefix(PREFIX), validate=True) if text.startswith(PREFIX) else b""
    except binascii.Error:
        key = b""
    if not 24 <= len(key) <= 64:
        msg = f"receiver {receiver}: secret file {path} holds no secret of a webhook: make one with `rankscope alert secret > {path}`"
        raise ConfigError(msg)
    return key
