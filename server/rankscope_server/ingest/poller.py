"""
Polling one exporter: new steps several times a second, ranks once a second, requests while something drifts.

Each exporter has loops of its own, so one that hangs delays no other. What goes wrong is noted at the exporter's track
and tried again, less often the longer it lasts.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import httpx2
import structlog

from rankscope_exporter.contract import RANKS_PATH, REQUESTS_PATH, STEPS_PATH
from rankscope_server.ingest.client import CursorVoidError, ExporterError, fetch_ranks, fetch_requests, fetch_steps
from rankscope_server.ingest.clock import Clock
from rankscope_server.ingest.tracks import ExporterTrack

logger = structlog.get_logger("rankscope.ingest")

RANKS_SECONDS = 1.0
MAX_BACK_OFF_SECONDS = 4.0


def back_off(failures: int, period: float, jitter: float) -> float:
    """
    Seconds to wait after so many failures in a row; `jitter` from 0 to 1 spreads exporters that failed together.
    """
    if failures == 0:
        return period
    return min(MAX_BACK_OFF_SECONDS, max(period, 0.25) * float(2 ** min(failures, 8))) * (0.75 + jitter / 4)


@dataclass(slots=True)
class PollCounts:
    """
    How polling goes, for the server's own metrics.
    """

    polls: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Poller:
    """
    Polls one exporter into its track. `changed` is called after each answer that was taken in.
    """

    def __init__(
        self,
        track: ExporterTrack,
        client: httpx2.AsyncClient,
        clock: Clock,
        *,
        changed: Callable[[str], None],
        drifts: Callable[[str], bool],
        period: float = 0.25,
        counts: PollCounts | None = None,
    ) -> None:
        self.track = track
        self.counts = counts or PollCounts()
        self._client = client
        self._clock = clock
        self._changed = changed
        self._drifts = drifts
        self._period = period
        self._ranks_wanted = anyio.Event()

    async def run(self) -> None:
        """
        Poll until cancelled.
        """
        await self.poll_ranks()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._loop, self.poll_steps, self._period)
            tasks.start_soon(self._loop, self._poll_slowly, RANKS_SECONDS)

    def hurry(self) -> None:
        """
        Ask for ranks at once: something was done to them.
        """
        self._ranks_wanted.set()

    async def _loop(self, poll: Callable[[], Awaitable[bool]], period: float) -> None:
        failures = 0
        while True:
            failures = 0 if await poll() else failures + 1
            delay = back_off(failures, period, random.random())  # noqa: S311  spreads load, guards nothing
            if period < RANKS_SECONDS:
                await self._clock.sleep(delay)
                continue
            with anyio.move_on_after(delay):  # sooner, when steps name a rank that is not known yet
                await self._ranks_wanted.wait()
            self._ranks_wanted = anyio.Event()

    async def _poll_slowly(self) -> bool:
        good = await self.poll_ranks()
        if not self._drifts(self.track.deployment):
            self.track.errors.pop(REQUESTS_PATH, None)  # not asked for any more, so nothing is wrong with it
        elif good:
            await self.poll_requests()
        return good

    async def poll_steps(self) -> bool:
        """
        Ask for new steps; whether that went well.
        """
        return await self._attempt(STEPS_PATH, self._take_steps)

    async def poll_ranks(self) -> bool:
        """
        Ask for ranks; whether that went well.
        """
        return await self._attempt(RANKS_PATH, self._take_ranks)

    async def poll_requests(self) -> bool:
        """
        Ask for the requests that drift; whether that went well.
        """
        return await self._attempt(REQUESTS_PATH, self._take_requests)

    async def _take_steps(self) -> None:
        track = self.track
        if track.refetch:
            track.cursor, track.refetch = "", False
        try:
            frame = await fetch_steps(self._client, track.url, track.cursor)
        except CursorVoidError:
            logger.info("exporter.cursor_void", exporter=track.url)
            frame = await fetch_steps(self._client, track.url, "")
        if track.absorb_steps(frame, self._clock.now()):
            self._ranks_wanted.set()

    async def _take_ranks(self) -> None:
        self.track.absorb_ranks(await fetch_ranks(self._client, self.track.url), self._clock.now())

    async def _take_requests(self) -> None:
        self.track.absorb_requests(await fetch_requests(self._client, self.track.url))

    async def _attempt(self, path: str, take: Callable[[], Awaitable[None]]) -> bool:
        track = self.track
        began = self._clock.now()
        self.counts.polls[path] = self.counts.polls.get(path, 0) + 1
        try:
            await take()
        except ExporterError as error:
            self._fail(path, str(error))
            return False
        except Exception as error:
            # Whatever an exporter sends, polling goes on and tells.
            logger.exception("exporter.poll_crashed", exporter=track.url, path=path)
            self._fail(
                path,
                f"its answer could not be taken in ({type(error).__name__}): upgrade the older of exporter and server",
            )
            return False
        now = self._clock.now()
        self.counts.seconds += now.monotonic - began.monotonic
        if track.errors.pop(path, None) is not None:
            logger.info("exporter.back", exporter=track.url, path=path)
        track.answered[path] = now.monotonic
        self._changed(track.deployment)
        return True

    def _fail(self, path: str, message: str) -> None:
        self.counts.failures[path] = self.counts.failures.get(path, 0) + 1
        if self.track.errors.get(path) != message:
            logger.warning("exporter.failed", exporter=self.track.url, path=path, error=message)
        self.track.errors[path] = message
        self._changed(self.track.deployment)
