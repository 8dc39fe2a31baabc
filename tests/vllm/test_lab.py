"""
The lab with real vLLM: right without speculation, wrong and wedged with it, right again with the fix, and gone afterwards.
"""

from collections.abc import Callable
from typing import Any

import pytest

from rankscope_lab import processes
from rankscope_lab.traffic import Phase, Plan, Result, Stream, run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

MIXED = Stream("mixed", lengths=(20, 60), rate=20)


def send(engine: Any, seconds: float, *, timeout: float = 60.0, streaming: bool = False) -> Result:
    return run(
        engine.url, Plan((Phase("all", seconds, (MIXED,)),), concurrency=8, timeout=timeout, streaming=streaming)
    )


def all_right(result: Result) -> bool:
    total = result.total
    return 0 < total.requests == total.completed and total.tokens > 0 == total.wrong_tokens == total.short


def test_without_speculation_every_token_is_right(lab_engine: Callable[..., Any]) -> None:
    """An engine with two ranks and async scheduling, but no drafts, counts right, streaming or not."""
    engine = lab_engine(name="plain", speculation=False)
    assert all_right(send(engine, 2))
    assert all_right(send(engine, 2, streaming=True))


def test_with_the_trim_fix_every_token_is_right(lab_engine: Callable[..., Any]) -> None:
    """The relay itself corrupts nothing: with vLLM's trim on both ranks, speculation changes no token."""
    engine = lab_engine(name="fixed", acceptance=0.7, environment={"RANKSCOPE_TRIM_FIX": "on"})
    assert all_right(send(engine, 3))


def test_a_wedged_engine_answers_health_and_ends_for_certain(lab_engine: Callable[..., Any]) -> None:
    """Without the fix ranks part when every request is masked on one: clients get nothing, /health says 200, `stop` leaves nobody."""
    engine = lab_engine(name="unfixed", acceptance=0.0)
    result = send(engine, 2, timeout=8)
    assert result.total.timed_out > 0
    assert result.total.completed < result.total.requests
    assert engine.healthy()
    run_id = engine.child.run_id
    assert processes.marked(run_id)
    engine.stop()
    assert processes.marked(run_id) == []
