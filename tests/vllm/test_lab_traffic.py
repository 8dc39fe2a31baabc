"""
Traffic against a stand-in for the API server: what is asked is seeded, and what is answered is checked.
"""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable

import httpx2

from rankscope_lab.counting import ANCHOR, after
from rankscope_lab.story import story
from rankscope_lab.traffic import Phase, Plan, Request, Result, Stream, Traffic, ask, requests_of

MIXED = Stream("mixed", lengths=(3, 9), rate=500)
Handler = Callable[[httpx2.Request], Awaitable[httpx2.Response]]


def counted(request: httpx2.Request) -> list[int]:
    body = json.loads(request.content)
    return [after(body["prompt"][-1], place) for place in range(1, body["max_tokens"] + 1)]


def answer(tokens: list[int]) -> httpx2.Response:
    return httpx2.Response(200, json={"choices": [{"token_ids": tokens}]})


def client_of(handler: Handler) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.MockTransport(handler), base_url="http://engine.test")


def run(plan: Plan, handler: Handler) -> Result:
    async def traffic() -> Result:
        async with client_of(handler) as client:
            return await Traffic("http://engine.test", plan, client=client).run()

    return asyncio.run(traffic())


def test_right_answers_are_counted_as_right() -> None:
    """An engine that counts completes every request with no wrong token, phase by phase."""

    async def engine(request: httpx2.Request) -> httpx2.Response:
        return answer(counted(request))

    result = run(Plan((Phase("one", 0.05, (MIXED,)), Phase("two", 0.05, (MIXED,)))), engine)
    assert result.total.requests == result.total.completed > 1
    assert result.total.wrong_tokens == result.total.short == 0
    assert result.phases["one"].requests + result.phases["two"].requests == result.total.requests


def test_a_token_that_is_skipped_is_noticed() -> None:
    """A token left out makes those after it wrong, and the answer short."""

    async def engine(request: httpx2.Request) -> httpx2.Response:
        tokens = counted(request)
        return answer(tokens[:1] + tokens[2:])

    total = run(Plan((Phase("all", 0.05, (MIXED,)),)), engine).total
    assert total.wrong_requests == total.short == total.requests > 0
    assert total.wrong_tokens == total.tokens - total.requests


def test_a_wedged_engine_times_every_client_out() -> None:
    """When no answer comes, clients give up after their timeout, and never more are in flight than allowed."""
    in_flight = highest = 0

    async def engine(_: httpx2.Request) -> httpx2.Response:
        nonlocal in_flight, highest
        in_flight += 1
        highest = max(highest, in_flight)
        try:
            await asyncio.Event().wait()
        finally:
            in_flight -= 1
        raise AssertionError

    total = run(Plan((Phase("all", 0.2, (MIXED,)),), concurrency=3, timeout=0.05), engine).total
    assert total.timed_out == total.requests > 0
    assert highest == 3


def test_a_stream_of_runners_keeps_so_many_running() -> None:
    """With `running`, the next request begins when one ends, and not before."""
    in_flight = highest = served = 0

    async def engine(request: httpx2.Request) -> httpx2.Response:
        nonlocal in_flight, highest, served
        in_flight += 1
        served += 1
        highest = max(highest, in_flight)
        await asyncio.sleep(0.005)
        in_flight -= 1
        return answer(counted(request))

    run(Plan((Phase("all", 0.2, (Stream("anchors", (3, 9), running=2, anchor=True),)),)), engine)
    assert highest == 2
    assert served > 2


def test_anchors_are_withdrawn_when_their_phase_ends() -> None:
    """What holds the guard open does so for its phase and no longer; it is then neither completed nor timed out."""
    cancelled = 0

    async def engine(_: httpx2.Request) -> httpx2.Response:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise
        raise AssertionError

    anchors = Stream("anchors", (3, 9), running=2, anchor=True)
    assert run(Plan((Phase("all", 0.05, (anchors,)),), timeout=30), engine).total.requests == 0
    assert cancelled == 2


def test_an_error_of_the_server_is_a_failure_that_is_named() -> None:
    """A status of 500 is neither completed nor timed out."""

    async def engine(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(500)

    total = run(Plan((Phase("all", 0.02, (MIXED,)),)), engine).total
    assert total.failed == total.requests > 0
    assert "500" in next(iter(total.failures))


def test_streamed_tokens_count_though_the_end_never_comes() -> None:
    """With streaming, what came before the engine wedged is counted."""

    async def chunks() -> object:
        for token in (21, 22):
            yield f"data: {json.dumps({'choices': [{'token_ids': [token]}]})}\n\n".encode()
        await asyncio.Event().wait()

    async def engine(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=chunks())

    async def one() -> None:
        async with client_of(engine) as client:
            got = await ask(client, Request((19, 20), 9), timeout=0.1, streaming=True)
        assert (got.outcome, got.tokens, got.wrong_tokens) == ("timed_out", (21, 22), 0)

    asyncio.run(one())


def test_the_same_seed_asks_for_the_same_requests() -> None:
    """Requests repeat with their seed, and differ without it."""
    draw = [
        [requests.next() for _ in range(20)]
        for requests in (requests_of(MIXED, 1), requests_of(MIXED, 1), requests_of(MIXED, 2))
    ]
    assert draw[0] == draw[1] != draw[2]


def test_poisson_arrivals_have_the_rate_as_their_mean() -> None:
    """Irregular arrivals come as often as regular ones, on average."""
    requests = requests_of(Stream("sparse", (1, 2), rate=4, regular=False), 1)
    pauses = [requests.pause() for _ in range(4000)]
    assert 0.23 < sum(pauses) / len(pauses) < 0.27
    assert len(set(pauses)) > 3000
    assert set(itertools.islice((requests_of(MIXED, 1).pause() for _ in itertools.count()), 5)) == {1 / 500}


def test_the_story_holds_with_anchors_and_then_goes_on_without() -> None:
    """Anchors run while the guard is held, and never afterwards; the story has no end of its own."""
    hold, thin = story(30, seed=0, slots=16).phases
    assert hold.seconds == 30
    assert [stream.running for stream in hold.streams if stream.anchor] == [4]
    assert not any(stream.anchor for stream in thin.streams)
    assert thin.seconds == float("inf")
    assert requests_of(hold.streams[0], 0).next().prompt[0] == ANCHOR
