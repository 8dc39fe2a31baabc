"""
From the look at which an alert fires to the request that tells a receiver: kept in a store on disk, then sent over HTTP,
with a dead receiver beside the one that is measured.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import anyio
import figures
import structlog
from anyio import to_thread

SUPPORT = Path(__file__).parents[1] / "support"
sys.path.insert(0, str(SUPPORT))

from catching import Catching, catching
from made_alerts import RANK, made_finding
from made_ranks import made_engine

from rankscope_server.alerting.desk import AlertDesk, EngineLook
from rankscope_server.domain.alert_notice import Links
from rankscope_server.domain.alert_rules import Timing
from rankscope_server.domain.model import FindingKind, Severity
from rankscope_server.ingest.clock import SystemClock
from rankscope_server.notify.create import create_receivers
from rankscope_server.settings import load_settings
from rankscope_server.store import open_store
from rankscope_server.store.alerts import AlertStore

DEAD = "http://127.0.0.1:9"
GUARD = made_finding(FindingKind.GUARD_DISAGREEMENT, Severity.CRITICAL)


async def measure(receiver: Catching, directory: Path, rounds: int) -> list[float]:
    """
    Seconds from each look to the arrival of its notification.
    """
    clock = SystemClock()
    settings = load_settings(flags={"alertmanagers": (DEAD, receiver.url)})
    desk = AlertDesk(
        create_receivers(settings.receivers, Links()),
        clock,
        deployments={"chat"},
        timings={"RankscopeGuardDisagreement": Timing(0.0, 0.0)},
    )
    store = await open_store(f"sqlite+aiosqlite:///{directory / 'alerts.db'}")
    await desk.restore(AlertStore(store))
    seconds = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.run)
        for number in range(2 * rounds):
            findings = [GUARD] if number % 2 == 0 else []
            now = clock.now()
            facts = made_engine(RANK, now=now, answered=now.monotonic)
            before, began = len(receiver.caught), time.monotonic()
            desk.observe("chat", [EngineLook(facts, findings)], facts.exporters, now)
            await to_thread.run_sync(receiver.wait, lambda held=before: len(receiver.caught) > held)
            seconds.append(receiver.caught[before].at - began)
        tasks.cancel_scope.cancel()
    await desk.close()
    await store.close()
    return seconds


def main() -> int:
    """
    Measure and report.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="alerts that fire and are resolved")
    rounds = parser.parse_args().rounds
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    figures.progress(f"alerts: {rounds} alerts fire and are resolved")
    with tempfile.TemporaryDirectory(prefix="rankscope-bench-") as directory, catching() as receiver:
        took = [1000 * one for one in anyio.run(measure, receiver, Path(directory), rounds)]
    report = figures.Figures("alerts")
    report.report("look_to_post_median_ms", round(statistics.median(took), 1), "<= 50", notifications=len(took))
    report.report(
        "look_to_post_p95_ms", round(statistics.quantiles(took, n=20)[-1], 1), "<= 100", worst=round(max(took), 1)
    )
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
