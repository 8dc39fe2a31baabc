"""
Accepting connections.

This is done here rather than by uvicorn because a TLS handshake is a wait for the client as well: it has its own limits
of time and number, and takes the certificate that is valid by now.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from rankscope_exporter.serve.private import Renewed

logger = logging.getLogger("rankscope.exporter")

MAX_HANDSHAKES = 64
"""
TLS handshakes at a time; one more ends the one that began first.
"""
RETRY_SECONDS = 1.0
"""
Pause after the system could not give a connection: it is out of descriptors or memory.
"""


class Acceptor:
    """
    Hands each connection of `listener` to a protocol that `make` makes, through TLS where there is a context.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        tls: Renewed[ssl.SSLContext] | None,
        handshake_seconds: float,
    ) -> None:
        self._listener = listener
        self._make = make
        self._tls = tls
        self._handshake_seconds = handshake_seconds
        self._opening: dict[asyncio.Task[None], None] = {}

    async def run(self) -> None:
        """
        Accept until cancelled.
        """
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        failing = False
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    if not failing:
                        logger.error("cannot accept connections: %s; trying on", error.strerror)  # noqa: TRY400  # the reason is all
                    failing = True
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                failing = False
                if len(self._opening) >= MAX_HANDSHAKES:
                    longest = next(iter(self._opening))
                    del self._opening[longest]
                    longest.cancel()
                task = loop.create_task(self._open(connection))
                self._opening[task] = None
                task.add_done_callback(self._opened)
                # While others wait to be accepted nothing above yields, and what was accepted would never get its turn.
                await asyncio.sleep(0)
        finally:
            for task in list(self._opening):
                task.cancel()

    def _opened(self, task: "asyncio.Task[None]") -> None:
        self._opening.pop(task, None)

    async def _open(self, connection: socket.socket) -> None:
        options = (
            {} if self._tls is None else {"ssl": self._tls.value, "ssl_handshake_timeout": self._handshake_seconds}
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, connection, **options)  # type: ignore[arg-type]
        except OSError as error:  # all that a client can do wrong in a handshake is one
            logger.debug("a connection was not made: %s", error)
