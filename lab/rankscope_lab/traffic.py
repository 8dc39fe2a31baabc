"""
Seeded traffic over HTTP, its answers checked token by token: the target counts, so every token is known beforehand.
"""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from rankscope_lab import counting
from rankscope_lab.engine import SERVED_MODEL

KEEP_ALIVE_SECONDS = 2.0
"""
How long an idle connection is used again: well below the 5 seconds after which vLLM's server closes it, or a request
may be sent into a connection that is being closed.
"""
FAILURE_PAUSE_SECONDS = 0.5
"""
Before a request that failed at once is followed by the next: a server that is down is not run over.
"""


@dataclass(frozen=True, slots=True)
class Stream:
    """
    One kind of request, and how it arrives: `rate` a second, or so many `running` at any time.
    """

    name: str
    lengths: tuple[int, int]
    """Fewest and most tokens asked for."""
    rate: float = 0.0
    """Arrivals a second; 0 with `running`."""
    regular: bool = True
    """Evenly spaced arrivals; otherwise a Poisson process."""
    running: int = 0
    """Instead of a rate: each time one of so many ends, the next begins. The first ones are of staggered lengths."""
    prompts: tuple[int, int] = (2, 8)
    """Fewest and most tokens in a prompt."""
    anchor: bool = False
    """Requests whose drafts are all right: they never drift, and hold the guard open while they run. Those that run when
    their phase ends are withdrawn, and not counted."""


@dataclass(frozen=True, slots=True)
class Phase:
    """
    Streams that run beside each other for a while.
    """

    name: str
    seconds: float
    """`inf`: until the traffic is cancelled."""
    streams: tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Phases one after the other. The same plan asks for the same requests in the same order.
    """

    phases: tuple[Phase, ...]
    seed: int = 0
    concurrency: int = 8
    """Requests in flight. Those that are kept running have their places; arrivals wait for what is left, one at least."""
    timeout: float = 15.0
    """Seconds after which a client gives up."""
    streaming: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """
    A prompt, and how many tokens shall follow it.
    """

    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """
    What came of a request.
    """

    request: Request
    outcome: str
    """`completed`, `timed_out` or `failed`."""
    tokens: tuple[int, ...]
    seconds: float
    detail: str = ""

    @property
    def wrong_tokens(self) -> int:
        """Tokens that are not what a correct engine puts at their place."""
        return counting.wrong_tokens(self.request.prompt, self.tokens)


@dataclass(slots=True)
class Tally:
    """
    Sums over answers.
    """

    requests: int = 0
    completed: int = 0
    timed_out: int = 0
    failed: int = 0
    tokens: int = 0
    wrong_tokens: int = 0
    wrong_requests: int = 0
    short: int = 0
    """Completed with fewer tokens than asked for."""
    longest_seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Answer) -> None:
        """
        Count one answer.
        """
        wrong = answer.wrong_tokens
        self.requests += 1
        self.completed += answer.outcome == "completed"
        self.timed_out += answer.outcome == "timed_out"
        self.failed += answer.outcome == "failed"
        self.tokens += len(answer.tokens)
        self.wrong_tokens += wrong
        self.wrong_requests += wrong > 0
        self.short += answer.outcome == "completed" and len(answer.tokens) < answer.request.tokens
        self.longest_seconds = max(self.longest_seconds, answer.seconds)
        if answer.outcome == "failed":
            self.failures[answer.detail] += 1


@dataclass(slots=True)
class Result:
    """
    Sums over all of the traffic, and per phase.
    """

    total: Tally = field(default_factory=Tally)
    phases: dict[str, Tally] = field(default_factory=dict)

    def add(self, phase: str, answer: Answer) -> None:
        """
        Count one answer.
        """
        self.total.add(answer)
        self.phases.setdefault(phase, Tally()).add(answer)


def requests_of(stream: Stream, seed: int) -> "Requests":
    """
    The endless, seeded requests of a stream.
    """
    return Requests(stream, random.Random(f"{seed}/{stream.name}"))


class Requests:
    """
    Draws request after request.
    """

    def __init__(self, stream: Stream, chance: random.Random) -> None:
        self._stream = stream
        self._chance = chance

    def next(self, shortened_to: float = 1.0) -> Request:
        """
        The next request; its length times `shortened_to`.
        """
        start = self._chance.randint(counting.FIRST, counting.LAST)
        length = self._chance.randint(*self._stream.prompts)
        prompt = [counting.after(start, place) for place in range(length)]
        if self._stream.anchor:
            prompt = [counting.ANCHOR, *prompt]
        tokens = self._chance.randint(*self._stream.lengths)
        return Request(tuple(prompt), max(1, round(tokens * shortened_to)))

    def pause(self) -> float:
        """
        Seconds until the next arrival.
        """
        mean = 1 / self._stream.rate
        return mean if self._stream.regular else self._chance.expovariate(1 / mean)


class Traffic:
    """
    Runs a plan against one engine; `result` can be looked at while it runs.
    """

    def __init__(
        self,
        url: str,
        plan: Plan,
        *,
        client: httpx2.AsyncClient | None = None,
        on_phase: Callable[[Phase], None] | None = None,
    ) -> None:
        self.result = Result()
        self.in_flight = 0
        self._url = url
        self._plan = plan
        self._client = client
        self._on_phase = on_phase or (lambda _: None)
        reserved = max((sum(stream.running for stream in phase.streams) for phase in plan.phases), default=0)
        self._room = asyncio.Semaphore(max(1, plan.concurrency - reserved))
        self._sent: set[asyncio.Task[Answer]] = set()

    async def run(self) -> Result:
        """
        Run all phases, then wait for the answers that are still out.
        """
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=self._plan.concurrency, keepalive_expiry=KEEP_ALIVE_SECONDS
        )
        client = self._client or httpx2.AsyncClient(base_url=self._url, timeout=None, limits=limits)
        try:
            for phase in self._plan.phases:
                self._on_phase(phase)
                await self._run_phase(client, phase)
            if self._sent:
                await asyncio.wait(self._sent)
        finally:
            for task in self._sent:
                task.cancel()
            await asyncio.gather(*self._sent, return_exceptions=True)
            if self._client is None:
                await client.aclose()
        return self.result

    async def _run_phase(self, client: httpx2.AsyncClient, phase: Phase) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + phase.seconds
        async with asyncio.TaskGroup() as group:
            for stream in phase.streams:
                requests = requests_of(stream, self._plan.seed)
                if stream.running:
                    for place in range(stream.running):
                        group.create_task(
                            self._keep_running(
                                client, phase, stream, requests, until, first=(place + 1) / stream.running
                            )
                        )
                else:
                    group.create_task(self._arrive(client, phase, requests, until))

    async def _arrive(self, client: httpx2.AsyncClient, phase: Phase, requests: Requests, until: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while due < until:
            await asyncio.sleep(due - loop.time())
            due += requests.pause()
            if not await self._enter(until):
                return
            self._send(client, phase, requests.next()).add_done_callback(lambda _: self._room.release())
            due = max(due, loop.time())

    async def _keep_running(
        self,
        client: httpx2.AsyncClient,
        phase: Phase,
        stream: Stream,
        requests: Requests,
        until: float,
        *,
        first: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            task = self._send(client, phase, requests.next(first))
            first = 1.0
            await asyncio.wait([task], timeout=None if math.isinf(until) else max(0.0, until - loop.time()))
            if not task.done() and stream.anchor:
                task.cancel()
            elif task.done() and task.result().outcome == "failed":
                await asyncio.sleep(FAILURE_PAUSE_SECONDS)

    def _send(self, client: httpx2.AsyncClient, phase: Phase, request: Request) -> asyncio.Task[Answer]:
        task = asyncio.create_task(self._ask(client, phase, request))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)
        return task

    async def _enter(self, until: float) -> bool:
        """
        Wait for room for one more arrival; False if the phase ends first.
        """
        left = until - asyncio.get_running_loop().time()
        try:
            # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with the room.
            async with asyncio.timeout(None if math.isinf(until) else max(0.0, left)):
                await self._room.acquire()
        except TimeoutError:
            return False
        return True

    async def _ask(self, client: httpx2.AsyncClient, phase: Phase, request: Request) -> Answer:
        self.in_flight += 1
        try:
            answer = await ask(client, request, timeout=self._plan.timeout, streaming=self._plan.streaming)
        finally:
            self.in_flight -= 1
        self.result.add(phase.name, answer)
        return answer


async def ask(client: httpx2.AsyncClient, request: Request, *, timeout: float, streaming: bool = False) -> Answer:
    """
    Send one request and wait for its answer, or for `timeout` seconds. With `streaming`, tokens that came before count.
    """
    began = time.monotonic()
    tokens: list[int] = []
    outcome, detail = "completed", ""
    try:
        async with asyncio.timeout(timeout):
            async for some in _tokens(client, request, streaming=streaming):
                tokens += some
    except TimeoutError:
        outcome = "timed_out"
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        outcome, detail = "failed", f"{type(error).__name__}: {error}"
    return Answer(request, outcome, tuple(tokens), time.monotonic() - began, detail)


async def _tokens(client: httpx2.AsyncClient, request: Request, *, streaming: bool) -> AsyncIterator[Sequence[int]]:
    body = {
        "model": SERVED_MODEL,
        "prompt": list(request.prompt),
        "max_tokens": request.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": streaming,
    }
    if not streaming:
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        yield response.json()["choices"][0]["token_ids"]
        return
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ValueError(chunk["error"])
                for choice in chunk["choices"]:
                    yield choice.get("token_ids") or ()


def run(url: str, plan: Plan) -> Result:
    """
    Run a plan and return what came of it.
    """
    return asyncio.run(Traffic(url, plan).run())
