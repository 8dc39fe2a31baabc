"""
Watching NCCL through its RAS ports, in the background of the exporter process.

A scrape never waits for NCCL: it shows what the last answers said, with their age.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rankscope_exporter.collectors.nccl import Communicator, NcclView, SeenCommunicator, assess_communicator
from rankscope_exporter.serve.ras_address import RasAddress
from rankscope_exporter.serve.ras_answer import Answer, RasError
from rankscope_exporter.serve.ras_client import ask

logger = logging.getLogger("rankscope.exporter")

FROZEN_INTERVALS = 2
"""
A mismatch is frozen once this many intervals passed without a change of its counts: three answers, all the same.
"""
KEPT_INTERVALS = 8
"""
For how long a job that no answer speaks of any more is still shown.
"""
MOST_BACKOFF = 4
"""
Intervals between two questions, at most, while nothing listens.
"""
MOST_TOLD = 32
"""
Different troubles that are logged; those after them are still counted.
"""

Ask = Callable[[RasAddress], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class _Heard:
    """
    What an answer said, and when.
    """

    answer: Answer
    at: float


@dataclass(frozen=True, slots=True)
class _Counts:
    """
    Counts of a communicator, and since when they are what they are.
    """

    fingerprint: int
    since: float


def merge_answers(held: Sequence[_Heard], heard: _Heard, keep_seconds: float) -> tuple[_Heard, ...]:
    """
    The answers to show once `heard` came in.

    Engines of one node share the default port, and each question is answered by one of them. An answer takes the place
    of those that speak of the same processes; the others stay until they are too old. A text says of a healthy job only
    how many communicators it has, so that the newest text stands for all.
    """
    if heard.answer.format == "text":
        return (heard,)
    others = (old for old in held if old.answer.processes and not old.answer.processes & heard.answer.processes)
    return (heard, *(old for old in others if heard.at - old.at <= keep_seconds))


class RasWatch:
    """
    What is known through one RAS port. Not safe for threads: one event loop owns it.
    """

    def __init__(self, address: RasAddress, interval_seconds: float, clock: Callable[[], float]) -> None:
        """
        `clock` is monotonic, in seconds.
        """
        self.address = address
        self._interval = interval_seconds
        self._clock = clock
        self._held: tuple[_Heard, ...] = ()
        self._counts: dict[str, _Counts] = {}
        self._failures: dict[str, int] = {}
        self._refused_in_a_row = 0
        self._answered_at: float | None = None
        self._problem: str | None = "not asked yet"
        self._asked = False
        self._told: set[tuple[str, str]] = set()

    @property
    def delay_seconds(self) -> float:
        """Time to the next question."""
        return self._interval * min(max(self._refused_in_a_row, 1), MOST_BACKOFF)

    def heard(self, answer: Answer) -> None:
        """
        Take in an answer.
        """
        now = self._clock()
        self._asked, self._problem, self._refused_in_a_row, self._answered_at = True, None, 0, now
        self._held = merge_answers(self._held, _Heard(answer, now), KEPT_INTERVALS * self._interval)
        shown = {c.id: c.fingerprint for heard in reversed(self._held) for c in heard.answer.communicators}
        self._counts = {
            name: self._counts_now(name, print_, now) for name, print_ in shown.items() if print_ is not None
        }
        self._tell(logging.INFO, "", answer.nccl_version, f"NCCL {answer.nccl_version} answers on {self.address} ({answer.format})")  # fmt: skip

    def _counts_now(self, name: str, fingerprint: int, now: float) -> _Counts:
        before = self._counts.get(name)
        return before if before is not None and before.fingerprint == fingerprint else _Counts(fingerprint, now)

    def failed(self, error: RasError) -> None:
        """
        Take in that a question brought nothing.
        """
        self._asked, self._problem = True, str(error)
        self._failures[error.reason] = self._failures.get(error.reason, 0) + 1
        if error.reason == "refused":
            # No process of any engine is left that could answer.
            self._refused_in_a_row += 1
            self._held, self._counts = (), {}
        else:
            self._refused_in_a_row = 0
            now = self._clock()
            self._held = tuple(old for old in self._held if now - old.at <= KEPT_INTERVALS * self._interval)
        level = logging.INFO if error.reason == "refused" else logging.WARNING
        version = f" (NCCL {error.nccl_version})" if error.nccl_version else ""
        self._tell(level, error.reason, error.nccl_version, f"NCCL view, {error.reason}{version}: {error}")

    def _tell(self, level: int, reason: str, version: str, message: str) -> None:
        """
        Log each kind of news once.
        """
        if (reason, version) not in self._told and len(self._told) < MOST_TOLD:
            self._told.add((reason, version))
            logger.log(level, "%s", message)

    def view(self) -> NcclView:
        """
        What to show now.
        """
        now = self._clock()
        view = NcclView(
            str(self.address), self._problem is None if self._asked else None, failures=dict(self._failures)
        )
        if self._answered_at is None:
            return view
        view = replace(view, answer_age_seconds=now - self._answered_at)
        if not self._held:
            return view
        newest = self._held[0].answer
        summary: dict[tuple[str, str], int] = {}
        seen: dict[str, SeenCommunicator] = {}
        for heard in self._held:
            for key, count in heard.answer.summary.items():
                summary[key] = summary.get(key, 0) + count
            for communicator in heard.answer.communicators:
                seen.setdefault(communicator.id, self._seen(communicator, heard, now))
        return replace(
            view, nccl_version=newest.nccl_version, format=newest.format, summary=summary,
            communicators=tuple(seen.values()), left_out=sum(heard.answer.left_out for heard in self._held),
        )  # fmt: skip

    def _seen(self, communicator: Communicator, heard: _Heard, now: float) -> SeenCommunicator:
        counts = self._counts.get(communicator.id)
        unchanged = None if counts is None or communicator.fingerprint is None else max(heard.at - counts.since, 0.0)
        state = assess_communicator(communicator, unchanged, FROZEN_INTERVALS * self._interval)
        return SeenCommunicator(communicator, state, now - heard.at, unchanged)

    def health(self) -> dict[str, object]:
        """
        The port in the words of `/healthz`.
        """
        age = None if self._answered_at is None else round(self._clock() - self._answered_at, 1)
        version = self._held[0].answer.nccl_version if self._held else None
        return {
            "address": str(self.address),
            "up": self._problem is None,
            "reason": self._problem,
            "answer_age_seconds": age,
            "nccl_version": version,
        }


class NcclWatch:
    """
    All RAS ports of the settings, each asked by a task of its own.
    """

    def __init__(
        self, addresses: Sequence[RasAddress], interval_seconds: float, clock: Callable[[], float], ask: Ask = ask
    ) -> None:
        self.ports = tuple(RasWatch(address, interval_seconds, clock) for address in addresses)
        self._ask = ask

    def views(self) -> tuple[NcclView, ...]:
        """
        What to show now, port by port.
        """
        return tuple(port.view() for port in self.ports)

    def health(self) -> dict[str, object]:
        """
        The NCCL view in the words of `/healthz`.
        """
        return {"enabled": bool(self.ports), "ports": [port.health() for port in self.ports]}

    async def poll(self, port: RasWatch) -> None:
        """
        Ask one port once.
        """
        try:
            port.heard(await self._ask(port.address))
        except RasError as error:
            port.failed(error)
        except Exception as error:
            # A fault of ours must not end the watch unseen.
            logger.exception("NCCL view: asking %s failed", port.address)
            port.failed(RasError("fault", f"a fault of the exporter: {error!r}"))

    async def _watch(self, port: RasWatch) -> None:
        while True:
            await self.poll(port)
            await asyncio.sleep(port.delay_seconds)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """
        Ask all ports in the background, for as long as the context lasts.
        """
        tasks = [asyncio.create_task(self._watch(port)) for port in self.ports]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
