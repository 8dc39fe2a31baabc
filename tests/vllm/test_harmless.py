"""
Rankscope in trouble, on real vLLM: the same tokens come out, and nothing ends.

No exporter process runs in any of these. Drafts are always right here, so that ranks agree with and without the fix,
and every difference between two engines would be ours.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rankscope_exporter.flight import FlightFile, list_flight_files
from rankscope_lab.traffic import Request, Stream, ask, requests_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

REQUESTS = 24


def answers(engine: Any) -> list[tuple[int, ...]]:
    """
    Greedy answers to the same seeded requests, a few at a time; all must come, and count right.
    """

    async def send() -> list[tuple[int, ...]]:
        drawn = requests_of(Stream("harmless", lengths=(10, 60)), seed=7)
        requests: list[Request] = [drawn.next() for _ in range(REQUESTS)]
        room = asyncio.Semaphore(6)
        async with httpx2.AsyncClient(base_url=engine.url, timeout=None) as client:

            async def one(request: Request) -> tuple[int, ...]:
                async with room:
                    answer = await ask(client, request, timeout=90)
                assert answer.outcome == "completed", answer.detail
                assert answer.wrong_tokens == 0
                return answer.tokens

            return list(await asyncio.gather(*map(one, requests)))

    return asyncio.run(send())


@pytest.fixture(scope="module")
def without_rankscope(start_lab_engine: Callable[..., Any]) -> list[tuple[int, ...]]:
    """What an engine answers with RANKSCOPE_ENABLED=0."""
    with start_lab_engine(name="off", acceptance=1.0, environment={"RANKSCOPE_ENABLED": "0"}) as engine:
        return answers(engine)


def test_an_unwritable_flight_directory_changes_no_token(
    lab_engine: Callable[..., Any], without_rankscope: list[tuple[int, ...]]
) -> None:
    """Without a flight directory vLLM runs, with one warning per rank that says blind, and the same tokens come out."""
    engine = lab_engine(name="blind", acceptance=1.0, environment={"RANKSCOPE_FLIGHT_DIR": "/proc/rankscope"})
    assert answers(engine) == without_rankscope
    log = engine.child.log.read_text(errors="replace")
    assert log.count("this rank is blind") == 2
    assert "RANKSCOPE_FLIGHT_DIR" in log


def test_hooks_that_always_fail_change_no_token(
    lab_engine: Callable[..., Any], without_rankscope: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """With an error in every hook at every call the same tokens come out, the hooks take themselves out, and the file says so."""
    engine = lab_engine(
        name="failing",
        acceptance=1.0,
        environment={"RANKSCOPE_FLIGHT_DIR": str(tmp_path / "flight"), "RANKSCOPE_FAULT_INJECTION": "all"},
    )
    assert answers(engine) == without_rankscope
    files = list(list_flight_files(tmp_path / "flight"))
    assert len(files) == 2
    for path in files:
        with FlightFile(path) as flight:
            states = {hook["hook"]: hook["state"] for hook in flight.report()["hooks"]}
            assert states["execute_model"] == states["_update_states"] == states["sample_tokens"] == "removed"
            assert flight.faults() >= 30
            assert flight.step() == 0
            assert len(flight.records()) == 0
