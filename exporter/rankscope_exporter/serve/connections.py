"""
Connections: how many there may be at a time, and how long each may let this process wait.

uvicorn waits without end for a request of which a part has come, and for a client that does not take its answer. Neither
holds the event loop, but each holds a descriptor and memory, so each has its time here.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

RESERVE = 16
"""
Connections beyond the limit that are still answered: health with the truth, anything else with 503.
"""


class Droppable(Protocol):
    """
    A connection that can be ended at once.
    """

    def drop(self) -> None:
        """End it, whatever is still to be sent."""


class Connections:
    """
    All connections of this process, in the order in which they began to wait for a request of their client.

    A connection too many takes the place of the one that has waited longest for its client, so idle connections, however
    many, keep nobody out. Where none waits, `crowded` turns true, and past the reserve connections are refused.
    """

    def __init__(self, limit: int, reserve: int = RESERVE) -> None:
        self.limit = limit
        self._reserve = reserve
        self._waiting: dict[Droppable, None] = {}
        self._busy: set[Droppable] = set()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._waiting) + len(self._busy)

    @property
    def crowded(self) -> bool:
        """Whether there are more than the limit, all of them busy when they came."""
        return len(self) > self.limit

    def admit(self, connection: Droppable) -> bool:
        """
        Take in a new connection, which waits; False if there is no room for it.
        """
        if len(self) >= self.limit and self._waiting:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.drop()
        elif len(self) >= self.limit + self._reserve:
            return False
        self._waiting[connection] = None
        return True

    def begin(self, connection: Droppable) -> None:
        """
        Note that a whole request has come, which is being answered.
        """
        if connection in self._waiting:
            del self._waiting[connection]
            self._busy.add(connection)

    def end(self, connection: Droppable) -> None:
        """
        Note that it was answered: the connection waits for its client again.
        """
        if connection in self._busy:
            self._busy.discard(connection)
            self._waiting[connection] = None

    def forget(self, connection: Droppable) -> None:
        """
        Note that the connection is gone.
        """
        self._waiting.pop(connection, None)
        self._busy.discard(connection)


@dataclass(frozen=True, slots=True)
class Patience:
    """
    How long a connection may let this process wait, in seconds.
    """

    request: float
    """From the first byte of a request, or from the start, to the end of its head."""
    keep_alive: float
    """From one answer to the next request."""
    answer: float
    """Without taking anything of an answer that is ready."""


class Connection(H11Protocol):
    """
    uvicorn's connection, with a time for everything that its client has to do.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        connections: Connections,
        patience: Patience,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state=app_state)
        self._all = connections
        self._patience = patience
        self._deadline: asyncio.TimerHandle | None = None
        self._idle = False
        self._untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        if not self._all.admit(self):
            transport.abort()
            return
        self._wait(self._patience.request, idle=False)

    def data_received(self, data: bytes) -> None:
        """A client sent something."""
        super().data_received(data)
        if self._answering:
            self._begin()
        elif self._idle or self._deadline is None:
            self._wait(self._patience.request, idle=False)

    def on_response_complete(self) -> None:
        """An answer was handed to the transport, which may still be sending it."""
        super().on_response_complete()
        if self._answering:  # the next request came together with the last
            return
        self._all.end(self)
        # uvicorn closes it after `keep_alive`, which waits for the client to take what is left: this ends that too.
        self._wait(self._patience.keep_alive + self._patience.answer, idle=True)

    def pause_writing(self) -> None:
        """The client does not take what is sent."""
        super().pause_writing()
        self._untaken = self.loop.call_later(self._patience.answer, self.drop)

    def resume_writing(self) -> None:
        """The client has taken most of what was sent."""
        super().resume_writing()
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._all.forget(self)
        for timer in (self._deadline, self._untaken):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def drop(self) -> None:
        """End it at once, whatever is still to be sent."""
        self.transport.abort()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _begin(self) -> None:
        self._all.begin(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait(self, seconds: float, *, idle: bool) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._idle = idle
        self._deadline = self.loop.call_later(seconds, self.drop)
