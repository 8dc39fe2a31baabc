"""
The clock that the server runs by.
"""

import time
from typing import Protocol

import anyio

from rankscope_server.domain.clock import Moment


class Clock(Protocol):
    """
    Time and waiting, so that tests own both.
    """

    def now(self) -> Moment:
        """
        What both clocks say.
        """
        ...

    async def sleep(self, seconds: float) -> None:
        """
        Wait.
        """
        ...


class SystemClock:
    """
    The machine's clocks.
    """

    def now(self) -> Moment:
        """
        What both clocks say.
        """
        return Moment(time.time(), time.monotonic())

    async def sleep(self, seconds: float) -> None:
        """
        Wait.
        """
        await anyio.sleep(seconds)
