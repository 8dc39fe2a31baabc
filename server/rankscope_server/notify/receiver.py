"""
What a receiver is to those that send.
"""

from collections.abc import Sequence
from typing import Protocol

from rankscope_server.domain.alert_notice import Notice


class DeliveryError(Exception):
    """
    A receiver did not take what was sent; the message names the remedy, and holds no secret.
    """

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached
        """Whether it answered: then it may take other notices all the same."""


class Receiver(Protocol):
    """
    One place to send to: it takes everything or fails.
    """

    @property
    def name(self) -> str:
        """The name of the receiver in the settings, with what tells its instances apart."""

    @property
    def kind(self) -> str:
        """`alertmanager`, `webhook` or `apprise`."""

    @property
    def where(self) -> str:
        """Its address without secrets."""

    @property
    def batch(self) -> int:
        """How many notices it takes at once."""

    @property
    def remind_seconds(self) -> float | None:
        """How often it must be told of alerts that still fire; None if once is enough."""

    async def send(self, notices: Sequence[Notice], now_unix: float) -> None:
        """
        Deliver notices, at most `batch`.

        Raises:
            DeliveryError: it did not take them.

        """
        ...

    async def close(self) -> None:
        """
        Let go of connections.
        """
        ...
