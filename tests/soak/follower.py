"""
A reader of one exporter, as the dashboard and Prometheus are: steps four times a second with a cursor, ranks, metrics.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

import httpx2
from accounts import Accounts

from rankscope_exporter.contract import METRICS_PATH, RANKS_PATH, STEPS_PATH, RanksAnswer, StepsFrame
from rankscope_lab.processes import alive

PAUSE_SECONDS, METRICS_SECONDS = 0.25, 1.0
RESTART_PAUSE_SECONDS = 0.05
"""
Pause while the exporter is known to be down: what is measured then is how soon it answers.
"""
TIMEOUT_SECONDS = 5.0
RANK_LABEL = 'pp_rank="'


class Follower:
    """
    Reads until it is cancelled, and keeps account.

    Failures while the exporter is known to be down (`away`) are nobody's fault; all others are counted.
    """

    def __init__(self, url: str) -> None:
        self.accounts = Accounts()
        self.ranks: RanksAnswer | None = None
        """The last answer of `/v1/ranks`."""
        self.metrics = ""
        """The last page of `/metrics`."""
        self.answers: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.false_gone: list[str] = []
        """Keys of ranks that were called gone while their process was there."""
        self.processes: dict[str, tuple[int, int]] = {}
        """Process id and start time by key, as the flight file itself has them; filled in by who reads that."""
        self.away = True
        """Whether the exporter is known to be down."""
        self._absences = 0
        self._returning = False
        self._last_failure = "none"
        self._cursor = ""
        self._answered = asyncio.Event()
        self._client = httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False)

    def expect_absence(self) -> None:
        """
        The exporter is about to be ended.
        """
        self.away = True
        self._absences += 1
        self._returning = False
        self._answered.clear()

    async def first_answer(self, limit_seconds: float) -> None:
        """
        The exporter was started again: wait until it has answered.

        Raises:
            TimeoutError: it does not.

        """
        self._returning = True
        try:
            async with asyncio.timeout(limit_seconds):
                await self._answered.wait()
        except TimeoutError:
            msg = f"the exporter's first answer: not within {limit_seconds:.0f} s; the last failure was {self._last_failure}"
            raise TimeoutError(msg) from None

    async def run(self) -> None:
        """
        Read on and on.
        """
        next_metrics = 0.0
        try:
            while True:
                begin = time.monotonic()
                await self._read(STEPS_PATH, self._take_steps, {"cursor": self._cursor} if self._cursor else {})
                await self._read(RANKS_PATH, self._take_ranks)
                if begin >= next_metrics and not self.away:
                    next_metrics = begin + METRICS_SECONDS
                    await self._read(METRICS_PATH, self._take_metrics)
                pause = RESTART_PAUSE_SECONDS if self.away else PAUSE_SECONDS
                await asyncio.sleep(max(RESTART_PAUSE_SECONDS, begin + pause - time.monotonic()))
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await self._client.aclose()

    async def _read(
        self, path: str, take: Callable[[httpx2.Response], None], query: dict[str, str] | None = None
    ) -> None:
        absences = self._absences
        try:
            response = await self._client.get(path, params=query or {})
            response.raise_for_status()
            take(response)
        except (httpx2.HTTPError, ValueError) as error:
            self._last_failure = f"{path}: {type(error).__name__}: {error}"[:200]
            if not self.away and absences == self._absences:
                self.failures[self._last_failure] += 1
            return
        self.answers[path] += 1

    def _take_steps(self, response: httpx2.Response) -> None:
        frame = StepsFrame.decode(response.content)
        for head, records in zip(frame.header.ranks, frame.records, strict=True):
            self.accounts.take(head, records)
            if head.life.value == "gone" and head.key in self.processes and alive(*self.processes[head.key]):
                self.false_gone.append(head.key)
        self._cursor = frame.header.cursor
        if self._returning:  # before that, one that was told to end may still answer
            self._returning = self.away = False
            self._answered.set()

    def _take_ranks(self, response: httpx2.Response) -> None:
        self.ranks = RanksAnswer.model_validate_json(response.content)

    def _take_metrics(self, response: httpx2.Response) -> None:
        self.metrics = response.text

    def lives(self) -> dict[str, str]:
        """
        Life by key in the last answer of `/v1/ranks`.
        """
        return {rank.key: rank.life.value for rank in self.ranks.ranks} if self.ranks else {}

    def rank_samples(self) -> int:
        """
        Samples on the last metrics page that are about a rank.
        """
        return sum(RANK_LABEL in line for line in self.metrics.splitlines())
