"""
Those who wait for news: what Alertmanager holds, what an open page is sent, what the server foresees.

Each notes the wall clock when it first hears of something.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Self

import httpx2

ALERT_PERIOD_SECONDS = 0.02
VIEW_PERIOD_SECONDS = 0.25


class Watch:
    """
    A task for the time of an `async with` block; errors of the connection are tried again.
    """

    period_seconds = VIEW_PERIOD_SECONDS

    def __init__(self) -> None:
        self.http = httpx2.AsyncClient(timeout=5.0)
        self._task: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """
        Look once.
        """
        raise NotImplementedError

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(httpx2.HTTPError, KeyError, IndexError):
                await self.look()
            await asyncio.sleep(self.period_seconds)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.http.aclose()


class AlertWatch(Watch):
    """
    When each alert of a deployment was first seen at Alertmanager, by name.
    """

    period_seconds = ALERT_PERIOD_SECONDS

    def __init__(self, url: str, deployment: str) -> None:
        super().__init__()
        self.first_unix: dict[str, float] = {}
        self._url = url
        self._filter = {"filter": f'deployment="{deployment}"'}

    async def look(self) -> None:
        """
        Look once.
        """
        answer = await self.http.get(f"{self._url}/api/v2/alerts", params=self._filter)
        now = time.time()
        for alert in answer.json():
            self.first_unix.setdefault(alert["labels"]["alertname"], now)


class PageWatch(Watch):
    """
    When the stream of an open engine page first said each of some words.
    """

    def __init__(self, server_url: str, deployment: str, engine: str, words: tuple[str, ...]) -> None:
        super().__init__()
        self.first_unix: dict[str, float] = {}
        self._url = f"{server_url}/live/deployments/{deployment}/engines/{engine}"
        self._words = words

    async def look(self) -> None:
        """
        Read the stream to its end.
        """
        async for line in self._lines():
            for word in self._words:
                if word in line:
                    self.first_unix.setdefault(word, time.time())

    async def _lines(self) -> AsyncIterator[str]:
        async with self.http.stream("GET", self._url, timeout=httpx2.Timeout(5.0, read=30.0)) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                yield line


class ViewWatch(Watch):
    """
    What the engine page showed, look by look: forecasts, and every finding that ever was.
    """

    def __init__(self, server_url: str, deployment: str, engine: str) -> None:
        super().__init__()
        self.forecasts: list[tuple[float, dict[str, Any]]] = []
        self.findings: dict[str, dict[str, Any]] = {}
        """By kind, as it was seen last."""
        self.state = ""
        self._url = f"{server_url}/api/v1/deployments/{deployment}/engines/{engine}"

    async def look(self) -> None:
        """
        Look once.
        """
        answer = await self.http.get(self._url)
        answer.raise_for_status()
        view = answer.json()
        self.forecasts.append((time.time(), view["forecast"]))
        self.findings |= {finding["kind"]: finding for finding in view["findings"]}
        self.state = view["state"]
