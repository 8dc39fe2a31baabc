"""
Puts what becomes of alerts into the store, before receivers hear of it: a server that is killed in between knows, when it
is started again, what it has to tell.

Alerts matter more than bookkeeping: a store that cannot be written holds nothing up, and is written later.
"""

import contextlib

import anyio
import structlog

from rankscope_server.store.alerts import AlertStore, AlertWrite
from rankscope_server.store.store import StoreError

logger = structlog.get_logger("rankscope.alerts")

PATIENCE_SECONDS = 0.5
"""
How long an alert waits for a store that neither takes nor refuses what is written.
"""
RETRY_SECONDS = 2.0
HELD = 20_000
"""
Writes that wait for a store, at most; the oldest are lost then.
"""


class Ledger:
    """
    Writes to the store in order.
    """

    def __init__(self) -> None:
        self.problem = ""
        """What is wrong with the store, with the remedy; empty if nothing is."""
        self._store: AlertStore | None = None
        self._waiting: list[AlertWrite] = []
        self._woken = anyio.Event()
        self._tried = anyio.Event()

    def attach(self, store: AlertStore) -> None:
        """
        The store is there.
        """
        self._store = store
        self._woken.set()

    def later(self, write: AlertWrite) -> None:
        """
        Write, soon.
        """
        self._waiting.append(write)
        if len(self._waiting) > HELD:
            del self._waiting[:-HELD]
        self._woken.set()

    async def soon(self, write: AlertWrite) -> None:
        """
        Write, and come back when that was tried. A store that hangs is waited for only so long.
        """
        self.later(write)
        if self._store is None or self.problem:
            return
        tried = self._tried
        with anyio.move_on_after(PATIENCE_SECONDS):
            await tried.wait()

    async def flush(self) -> bool:
        """
        Write all that waits, in one transaction; whether nothing waits any more.
        """
        writes = list(self._waiting)
        tried, self._tried = self._tried, anyio.Event()
        try:
            if writes and self._store is not None:
                await self._store.write(writes)
                del self._waiting[: len(writes)]
            self.problem = ""
        except StoreError as error:
            text = (
                f"{error}. Alerts are sent all the same; if the server is restarted meanwhile, some may be sent twice."
            )
            if text != self.problem:
                logger.error("alerts.store_failed", error=str(error))  # noqa: TRY400  it says it all
            self.problem = text
        finally:
            tried.set()
        return not self._waiting

    async def sweep(self, before_unix: float) -> None:
        """
        Forget what is older than that; a store that cannot be written keeps it for longer.
        """
        if self._store is not None:
            with contextlib.suppress(StoreError):
                await self._store.sweep(before_unix)

    async def run(self) -> None:
        """
        Write until cancelled.
        """
        while True:
            if not self._waiting or self._store is None:
                self._woken = anyio.Event()
                await self._woken.wait()
            elif not await self.flush():
                await anyio.sleep(RETRY_SECONDS if self.problem else 0)
