"""Alerts at a real Alertmanager: they arrive, are resolved, and outlive its restarts."""

import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from made_alerts import RANK, made_finding
from made_ranks import made_engine
from prometheus import ToolMissingError, alerts_at, find_alertmanager, free_port, start_alertmanager

from rankscope_server.alerting.desk import AlertDesk, EngineLook
from rankscope_server.domain.alert_notice import Links
from rankscope_server.domain.alert_rules import RULES, Timing
from rankscope_server.domain.model import Finding, FindingKind, Severity
from rankscope_server.ingest.clock import SystemClock
from rankscope_server.notify.create import create_receivers
from rankscope_server.settings import load_settings

pytestmark = [pytest.mark.integration, pytest.mark.anyio]

WAIT = 60
"""Seconds until something that should happen counts as never happening: far more than a busy machine needs."""
GUARD = made_finding(FindingKind.GUARD_DISAGREEMENT, Severity.CRITICAL, "pp0 skips step 72, pp1 broadcasts")
STALLED = made_finding(FindingKind.STALLED, Severity.WARNING, "no rank has moved")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def needs_alertmanager() -> None:
    try:
        find_alertmanager()
    except ToolMissingError as error:
        if os.environ.get("RANKSCOPE_REQUIRE_ALL"):
            pytest.fail(str(error))
        pytest.skip(str(error))


class Watching:
    """A desk at work, whose engine is as the test says."""

    def __init__(self, *urls: str, remind_seconds: float = 60.0) -> None:
        self.clock = SystemClock()
        settings = load_settings(flags={"alertmanagers": urls})
        receivers = create_receivers(settings.receivers, Links("http://rankscope.example"))
        for receiver, _ in receivers:
            receiver.remind_seconds = remind_seconds
        timings = {name: Timing(0.0, 0.0) for name in RULES}
        self.desk = AlertDesk(receivers, self.clock, deployments={"chat"}, timings=timings)

    def look(self, *findings: Finding) -> None:
        now = self.clock.now()
        facts = made_engine(RANK, now=now, answered=now.monotonic)
        self.desk.observe("chat", [EngineLook(facts, findings, incident="i-1")], facts.exporters, now)


@contextlib.asynccontextmanager
async def watching(*urls: str, remind_seconds: float = 60.0) -> AsyncIterator[Watching]:
    made = Watching(*urls, remind_seconds=remind_seconds)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.desk.run)
        yield made
        tasks.cancel_scope.cancel()
    await made.desk.close()


async def until(holds: Callable[[], bool]) -> None:
    """Look again and again until something holds."""
    with anyio.fail_after(WAIT):
        while not await to_thread.run_sync(holds):
            await anyio.sleep(0.02)


def names_at(url: str) -> list[str]:
    return sorted(f"{labels['alertname']} {labels['severity']}" for labels in alerts_at(url))


async def test_alerts_arrive_at_every_instance_and_are_resolved(tmp_path: Path):
    """With labels and annotations; one that got worse is there as what it is now."""
    with start_alertmanager(tmp_path, name="one") as one, start_alertmanager(tmp_path, name="two") as two:
        async with watching(one, two) as made:
            made.look(GUARD, STALLED)
            expected = ["RankscopeGuardDisagreement critical", "RankscopeStalled warning"]
            await until(lambda: names_at(one) == names_at(two) == expected)
            labels = next(one for one in alerts_at(one) if one["alertname"] == "RankscopeGuardDisagreement")
            assert labels == {
                "alertname": "RankscopeGuardDisagreement",
                "severity": "critical",
                "deployment": "chat",
                "engine": "e1",
                "kind": "guard disagreement",
                "source": "rankscope-server",
            }
            made.look(GUARD, dataclasses.replace(STALLED, severity=Severity.CRITICAL))
            worse = ["RankscopeGuardDisagreement critical", "RankscopeStalled critical"]
            await until(lambda: names_at(one) == names_at(two) == worse)
            made.look()
            await until(lambda: names_at(one) == names_at(two) == [])
            assert [view.given_up for view in made.desk.view().receivers] == [0, 0]


async def test_an_alertmanager_that_was_restarted_learns_what_fires(tmp_path: Path):
    """From a reminder, although it kept nothing; what is over by then stays over."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with watching(url, remind_seconds=0.2) as made:
        with start_alertmanager(tmp_path, name="before", port=port):
            made.look(GUARD, STALLED)
            await until(lambda: len(names_at(url)) == 2)
        made.look(GUARD)
        await until(lambda: made.desk.view().receivers[0].healthy is False)
        with start_alertmanager(tmp_path, name="after", port=port):
            await until(lambda: names_at(url) == ["RankscopeGuardDisagreement critical"])
            await until(lambda: made.desk.view().receivers[0].waiting == 0)
            assert names_at(url) == ["RankscopeGuardDisagreement critical"]
            assert made.desk.problems() == ()


async def test_a_finding_is_at_alertmanager_within_a_moment(tmp_path: Path):
    """A benchmark says how soon; here a dead instance beside it must not hold it up for as long as that is waited for."""
    dead = f"http://127.0.0.1:{free_port()}"
    with start_alertmanager(tmp_path) as url:
        async with watching(dead, url) as made:
            began = time.monotonic()
            made.look(GUARD)
            await until(lambda: made.desk.view().receivers[1].delivered == 1)
            took = time.monotonic() - began
            assert names_at(url) == ["RankscopeGuardDisagreement critical"]
            assert made.desk.view().receivers[0].waiting == 1
            print(f"at Alertmanager after {took * 1000:.0f} ms")
