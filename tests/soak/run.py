"""
A soak on real vLLM, a JSON line for each figure: `run.py --minutes 30 --exporter-restarts 10 --vllm-restarts 3`.

One engine (PP=2, speculation and the trim fix on) serves traffic of which every token is known; an exporter process
serves its flight files; a follower reads that as a dashboard does, and accounts for every step of every rank. Meanwhile
the exporter is ended, killed and kept away, vLLM is started anew, once without room for its flight files, and a rank is
stopped. The minutes are those in which an engine serves; each start of vLLM comes on top.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "bench")]
from accounts import Fate
from events import Event, Kind, full_life, plan_events
from figures import Figures, progress
from follower import Follower
from ground import Ground, enter_namespace
from vitals import Growth, Vitals, assess_growth, is_worker, read_vitals

from rankscope_exporter.flight import FlightError, FlightFile, list_flight_files
from rankscope_exporter.flight.layout import file_bytes
from rankscope_exporter.serve.app import SWEEP_SECONDS
from rankscope_exporter.serve.steps import OVERLAP
from rankscope_lab import checkpoint, environment
from rankscope_lab.engine import Engine, EngineError, EngineOptions
from rankscope_lab.processes import Child, alive, free_port, marked
from rankscope_lab.traffic import Phase, Plan, Stream, Tally, Traffic

SEED = 54260
STREAMS = (
    Stream("steady", lengths=(100, 300), running=4),
    Stream("mixed", lengths=(20, 119), rate=2.0, regular=False),
)
REQUEST_SECONDS = 90.0
PACE_MS = 15.0
RING_STEPS = 256
"""
Steps that a flight file holds: some seconds, so that an exporter can be kept away until its ring has gone around.
"""
RETENTION_SECONDS = 20.0
STOP_SECONDS = 5.0
READY_SECONDS, WAIT_SECONDS = 600.0, 120.0
WATCH_SECONDS, POLL_SECONDS = 1.0, 0.05
EXPORTER_WARM_UP_SECONDS, WORKER_WARM_UP_SECONDS = 10.0, 45.0
SETTLING_KIB = 1024
"""
What a process may grow by after its warm-up without leaking: more requests at once than before, an answer after an outage.
"""
WORKER_KIB_PER_MINUTE = 150
"""
What a worker may grow by besides: without hooks it was 100 here. One that kept the record of each step would add 400.
The exporter has nothing besides: if it kept its answers, it would grow by 1200.
"""
RANKS = 2
BLIND = "this rank is blind"


class Soak:
    """
    What runs, what happened to it, and what was measured.
    """

    def __init__(self, seconds: float, events: tuple[Event, ...], full: int | None) -> None:
        self.seconds, self.events, self.full = seconds, events, full
        self.ground = Ground(file_bytes(RING_STEPS))
        os.environ["TMPDIR"] = str(self.ground.temporary)
        tempfile.tempdir = None
        self.lab = environment.default(os.environ)
        self.checkpoints = checkpoint.ensure(environment.REPOSITORY / "var" / "lab" / "checkpoints", self.lab.python)
        self.port = free_port()
        self.follower = Follower(f"http://127.0.0.1:{self.port}")
        self.life = -1
        self.engine: Engine | None = None
        self.exporter: Child | None = None
        self.run_ids: list[str] = []
        self.traffic: list[Traffic] = []
        self.done: list[str] = []
        self.last_steps: dict[str, int] = {}
        """Last step by key, as the flight files themselves have it."""
        self.exporter_vitals: list[list[Vitals]] = []
        self.worker_vitals: list[dict[int, list[Vitals]]] = []
        self.flight_files_max = 0
        self.first_answers: list[float] = []
        self.clean_exits: list[int | None] = []
        self.stopped_seconds: list[float] = []
        self.resumed_seconds: list[float] = []
        self.gone_seconds: list[float] = []
        self.removed_seconds: list[float] = []
        self.lost_in_outages: list[int] = []
        self.ranks_shown_without_room = 0
        self.blind_warnings = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._sending: asyncio.Task[Any] | None = None
        self._served = 0.0
        self._serving_since: float | None = None

    async def run(self) -> None:
        """
        Do it all; afterwards nothing runs.

        Raises:
            EngineError: vLLM did not start.
            TimeoutError: something that must happen did not.

        """
        try:
            await self._start_exporter()
            self._tasks = [asyncio.create_task(self.follower.run()), asyncio.create_task(self._watch())]
            await self.follower.first_answer(WAIT_SECONDS)
            await self._start_engine()
            for event in self.events:
                await self._serve_until(event.at_seconds)
                progress(f"soak: {self.served():.0f} s of {self.seconds:.0f} s: {event.kind.value}")
                await self._do(event)
                self.done.append(event.kind.value)
            await self._serve_until(self.seconds)
            progress("soak: ending; the last flight files are to be removed")
            await self._end_engine()
            await self._wait_removed()
            await self._end_exporter(signal.SIGTERM)
        finally:
            for task in self._running_tasks():
                task.cancel()
            await asyncio.gather(*self._running_tasks(), return_exceptions=True)
            for part in (self.engine, self.exporter):
                if part is not None:
                    await asyncio.to_thread(part.stop)

    def served(self) -> float:
        """
        Seconds in which an engine served.
        """
        return self._served + (0.0 if self._serving_since is None else time.monotonic() - self._serving_since)

    def _running_tasks(self) -> list[asyncio.Task[Any]]:
        return [*self._tasks, *([self._sending] if self._sending else [])]

    def _check_tasks(self) -> None:
        for task in self._running_tasks():  # none of them ends by itself, unless it failed
            if task.done():
                task.result()

    async def _serve_until(self, seconds: float) -> None:
        while (left := seconds - self.served()) > 0:
            self._check_tasks()
            await asyncio.wait(self._running_tasks(), timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _do(self, event: Event) -> None:
        if event.kind is Kind.VLLM_RESTART:
            await self._end_engine()
            await self._start_engine()
        elif event.kind is Kind.STOP_WORKER:
            await self._stop_worker(event.pp_rank)
        else:
            await self._restart_exporter(event.kind)

    async def _start_engine(self) -> None:
        self.life += 1
        has_room = self.life != self.full
        if not has_room:
            await self._wait_removed()
            self.ground.fill()
        elif self.life and self.life - 1 == self.full:
            self.ground.make_room()
        options = EngineOptions(
            python=self.lab.python,
            checkpoints=self.checkpoints,
            name=f"vLLM {self.life}" + ("" if has_room else ", no room for flight files"),
            acceptance=0.9,
            pace_ms=PACE_MS,
            seed=SEED + self.life,
            environment={
                "RANKSCOPE_FLIGHT_DIR": str(self.ground.flight),
                "RANKSCOPE_TRIM_FIX": "on",
                "RANKSCOPE_RING_STEPS": str(RING_STEPS),
                "RANKSCOPE_RETENTION_SECONDS": str(RETENTION_SECONDS),
            },
        )
        self.worker_vitals.append({})
        self.engine = Engine(options, self.ground.work / f"vllm-{self.life}.log")
        self.engine.start()
        self.run_ids.append(self.engine.child.run_id)
        took = await asyncio.to_thread(self.engine.wait_ready, READY_SECONDS, progress)
        progress(f"soak: {options.name}: ready after {took:.0f} s")
        if has_room:
            await self._until(lambda: len(self._running()) == RANKS, "both ranks of the new engine at the exporter")
        else:
            self.blind_warnings = self.engine.child.log.read_text(errors="replace").count(BLIND)
        plan = Plan((Phase("soak", float("inf"), STREAMS),), SEED + self.life, options.slots, REQUEST_SECONDS)
        self.traffic.append(Traffic(self.engine.url, plan))
        self._sending = asyncio.create_task(self.traffic[-1].run())
        self._serving_since = time.monotonic()

    async def _end_engine(self) -> None:
        """
        End vLLM under traffic: requests that are running are withdrawn, and count for nothing.
        """
        assert self.engine is not None
        assert self._sending is not None
        keys = self._running()
        self._served, self._serving_since = self.served(), None
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        self._sending = None
        self._read_flight_files()
        stopping = asyncio.create_task(asyncio.to_thread(self.engine.stop))
        if keys:
            await self._until(lambda: not any(alive(*self.follower.processes[key]) for key in keys), "the ranks' end")
            died = time.monotonic()
            await self._until(lambda: not self._running(), "the ended ranks as gone")
            self.gone_seconds.append(round(time.monotonic() - died, 2))
        await stopping
        self._read_flight_files()

    def _running(self) -> list[str]:
        return [key for key, life in self.follower.lives().items() if life != "gone"]

    async def _wait_removed(self) -> None:
        """
        Wait until retention has taken the files of ranks that are gone.
        """
        began = time.monotonic()
        had = bool(self.ground.flight_entries())
        await self._until(lambda: not self.ground.flight_entries(), "the removal of expired flight files")
        await self._until(lambda: not self.follower.lives(), "an exporter that shows no rank")
        if had:
            self.removed_seconds.append(round(time.monotonic() - began, 1))

    async def _start_exporter(self) -> None:
        command = (str(self.lab.exporter), "serve", "--flight-dir", str(self.ground.flight), "--port", str(self.port))
        retention = ("--retention-seconds", str(RETENTION_SECONDS))
        self.exporter = Child((*command, *retention), os.environ, self.ground.work / "exporter.log")
        self.run_ids.append(self.exporter.run_id)
        self.exporter_vitals.append([])
        self.exporter.start()

    async def _end_exporter(self, number: signal.Signals) -> None:
        assert self.exporter is not None
        child = self.exporter
        self.follower.expect_absence()
        for pid in child.pids():
            os.kill(pid, number)
        await self._until(lambda: child.exit_status() is not None, f"the end of the exporter on {number.name}")
        if number == signal.SIGTERM:
            self.clean_exits.append(child.exit_status())
        await asyncio.to_thread(child.stop)

    async def _restart_exporter(self, kind: Kind) -> None:
        await self._end_exporter(signal.SIGTERM if kind is Kind.EXPORTER_TERM else signal.SIGKILL)
        lost_before = self.follower.accounts.total(Fate.LOST)
        if kind is Kind.EXPORTER_OUTAGE:
            self._read_flight_files()
            goal = {key: self.last_steps[key] + RING_STEPS + 50 for key in self._running()}
            await self._until(lambda: self._reached(goal), "rings that have gone around while the exporter was away")
        began = time.monotonic()
        await self._start_exporter()
        await self.follower.first_answer(WAIT_SECONDS)
        self.first_answers.append(round(time.monotonic() - began, 2))
        if kind is Kind.EXPORTER_OUTAGE:
            self.lost_in_outages.append(self.follower.accounts.total(Fate.LOST) - lost_before)

    def _reached(self, goal: dict[str, int]) -> bool:
        self._read_flight_files()
        return all(self.last_steps[key] >= step for key, step in goal.items())

    async def _stop_worker(self, pp_rank: int) -> None:
        assert self.follower.ranks is not None
        rank = next(r for r in self.follower.ranks.ranks if r.identity.pp_rank == pp_rank and r.life.value == "running")
        key, pid = rank.key, rank.identity.pid
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            await self._until(lambda: self.follower.lives()[key] == "stopped", "the stopped rank as stopped")
            self.stopped_seconds.append(round(time.monotonic() - began, 2))
            await asyncio.sleep(STOP_SECONDS)
        finally:
            os.kill(pid, signal.SIGCONT)
        began = time.monotonic()
        self._read_flight_files()
        await self._until(lambda: self._reached({key: rank.step + 20}), "steps of the rank that was continued")
        await self._until(lambda: self.follower.lives()[key] == "running", "the continued rank as running")
        self.resumed_seconds.append(round(time.monotonic() - began, 2))

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not holds():
                    self._check_tasks()
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            msg = f"{what}: not within {WAIT_SECONDS:.0f} s"
            raise TimeoutError(msg) from None

    async def _watch(self) -> None:
        while True:
            self._read_flight_files()
            self.flight_files_max = max(self.flight_files_max, len(self.ground.flight_entries()))
            self._read_vitals(time.monotonic())
            if self._serving_since is not None and self.life == self.full:
                shown = max(len(self.follower.lives()), self.follower.rank_samples())
                self.ranks_shown_without_room = max(self.ranks_shown_without_room, shown)
            await asyncio.sleep(WATCH_SECONDS)

    def _read_flight_files(self) -> None:
        if not self.ground.flight.is_dir():
            return
        for path in list_flight_files(self.ground.flight):
            with contextlib.suppress(FlightError), FlightFile(path) as flight:
                self.last_steps[flight.key] = flight.step()
                self.follower.processes[flight.key] = (flight.pid, flight.process_start_ticks)

    def _read_vitals(self, now: float) -> None:
        if self.exporter is not None and not self.follower.away:
            for pid in self.exporter.pids():
                if vitals := read_vitals(pid, now, self.ground.flight):
                    self.exporter_vitals[-1].append(vitals)
        if self.engine is not None and self._serving_since is not None:
            for pid in self.engine.pids():
                if is_worker(pid) and (vitals := read_vitals(pid, now, self.ground.flight)):
                    self.worker_vitals[-1].setdefault(pid, []).append(vitals)


def report(figures: Figures, soak: Soak) -> None:
    """
    The figures.
    """
    report_plan(figures, soak)
    report_traffic(figures, soak)
    report_steps(figures, soak)
    report_exporter(figures, soak)
    report_growth(figures, soak)
    report_leftovers(figures, soak)


def report_plan(figures: Figures, soak: Soak) -> None:
    """
    What was done: all that was planned.
    """
    planned = [event.kind.value for event in soak.events]
    for kind in Kind:
        if kind.value in planned:
            figures.report(kind.value, soak.done.count(kind.value), f"= {planned.count(kind.value)}")
    figures.report("served_seconds", round(soak.served()), f">= {int(soak.seconds)}", lives=soak.life + 1)


def report_traffic(figures: Figures, soak: Soak) -> None:
    """
    Every request completed, every token right, in every life.
    """
    totals: list[Tally] = [traffic.result.total for traffic in soak.traffic]
    requests = sum(total.requests for total in totals)
    failures = [dict(total.failures) for total in totals if total.failures]
    figures.report("requests", requests, "> 0", by_life=[total.requests for total in totals])
    figures.report(
        "completed",
        sum(total.completed for total in totals),
        f"= {requests}",
        short=sum(total.short for total in totals),
        longest_seconds=round(max(total.longest_seconds for total in totals), 1),
        failures=failures,
    )
    tokens = [total.tokens for total in totals]
    figures.report("tokens_checked", sum(tokens), "> 0", by_life=tokens)
    figures.report("wrong_tokens", sum(total.wrong_tokens for total in totals), "= 0")
    if soak.full is not None:
        figures.report("tokens_checked_without_room", tokens[soak.full], "> 0", room=soak.ground.how)
        figures.report("blind_warnings_without_room", soak.blind_warnings, f"= {RANKS}")
        figures.report("ranks_shown_without_room", soak.ranks_shown_without_room, "= 0")


def report_steps(figures: Figures, soak: Soak) -> None:
    """
    Every step that a rank has begun was received, or reported as lost.
    """
    accounts = soak.follower.accounts
    ranks = list(accounts.ranks.values())
    unfinished = accounts.total(Fate.UNFINISHED)
    figures.report("ranks_seen", len(ranks), f"= {RANKS * (soak.life + 1 - (soak.full is not None))}")
    figures.report("steps_begun", sum(soak.last_steps.values()), "> 0")
    figures.report("steps_received", accounts.total(Fate.DONE), "> 0", unfinished=unfinished)
    gaps = accounts.unexplained(soak.last_steps)
    figures.report("gaps_unexplained", sum(gaps.values()), "= 0", by_rank=gaps)
    outages = [event for event in soak.events if event.kind is Kind.EXPORTER_OUTAGE]
    lost = accounts.total(Fate.LOST)
    figures.report("lost_steps_reported", lost, "> 0" if outages else "", in_outages=soak.lost_in_outages)
    figures.report("lost_though_received", sum(rank.lost_though_received for rank in ranks), "= 0")
    figures.report("sent_again_in_an_answer_max", max(rank.sent_again_max for rank in ranks), f"<= {OVERLAP}")
    common, different = accounts.different_batches()
    figures.report("batches_different", different, "= 0", compared=common)
    figures.report("drift_max", max(rank.drift_max for rank in ranks), "= 0")
    figures.report("trimmed_tokens", sum(rank.trimmed for rank in ranks), "> 0")


def report_exporter(figures: Figures, soak: Soak) -> None:
    """
    The exporter answers, and tells of ranks what holds.
    """
    follower = soak.follower
    answers = dict(follower.answers)
    figures.report(
        "failed_answers", sum(follower.failures.values()), "= 0", answers=answers, which=dict(follower.failures)
    )
    if soak.first_answers:
        figures.report("first_answer_seconds_max", max(soak.first_answers), "<= 20", each=soak.first_answers)
    figures.report("exits_on_sigterm_not_0", sum(status != 0 for status in soak.clean_exits), "= 0")
    figures.report("false_gone", len(follower.false_gone), "= 0")
    figures.report("gone_seen_seconds_max", max(soak.gone_seconds), "<= 2", each=soak.gone_seconds)
    if soak.stopped_seconds:
        figures.report("stopped_seen_seconds_max", max(soak.stopped_seconds), "<= 2", each=soak.stopped_seconds)
        figures.report("resumed_seconds_max", max(soak.resumed_seconds), "<= 30", each=soak.resumed_seconds)


def report_growth(figures: Figures, soak: Soak) -> None:
    """
    Neither the exporter nor vLLM's workers grow.
    """
    workers = [samples for life in soak.worker_vitals for samples in life.values()]
    report_growth_of(figures, "exporter", soak.exporter_vitals, EXPORTER_WARM_UP_SECONDS, kib_per_minute=0)
    report_growth_of(figures, "worker", workers, WORKER_WARM_UP_SECONDS, kib_per_minute=WORKER_KIB_PER_MINUTE)


def report_growth_of(
    figures: Figures, name: str, processes: list[list[Vitals]], warm_up_seconds: float, *, kib_per_minute: int
) -> None:
    """
    Growth of the process that is furthest above, or least below, what it may grow by; those seen too shortly do not count.
    """
    found = [growth for samples in processes if (growth := assess_growth(samples, warm_up_seconds))]
    if not found:  # unknown, which misses the goal
        figures.report(f"{name}_memory_growth_kib", None, f"<= {SETTLING_KIB}")
        return

    def allowed(growth: Growth) -> int:
        return round(SETTLING_KIB + kib_per_minute * growth.seconds / 60)

    worst = max(found, key=lambda growth: growth.memory_kib - allowed(growth))
    each = [described(growth) for growth in found]
    figures.report(f"{name}_memory_growth_kib", worst.memory_kib, f"<= {allowed(worst)}", each=each)
    figures.report(f"{name}_descriptors_growth_max", max(growth.descriptors for growth in found), "<= 0")
    figures.report(f"{name}_threads_growth_max", max(growth.threads for growth in found), "<= 0")


def described(growth: Growth) -> dict[str, Any]:
    """
    A growth as it stands beside a figure.
    """
    return {
        "seconds": growth.seconds,
        "memory_kib": growth.memory_kib,
        "kib_per_minute": growth.slope_kib_per_minute,
        "descriptors": growth.descriptors,
        "threads": growth.threads,
        "resident_mib": growth.last.resident_kib // 1024,
        "descriptors_at_end": growth.last.descriptors,
        "threads_at_end": growth.last.threads,
    }


def report_leftovers(figures: Figures, soak: Soak) -> None:
    """
    Nothing is left behind.
    """
    ground = soak.ground
    retained = max(soak.removed_seconds)
    figures.report("flight_files_max", soak.flight_files_max, f"<= {2 * RANKS}")
    figures.report("flight_files_removed_seconds_max", retained, f"<= {RETENTION_SECONDS + SWEEP_SECONDS + 10:.0f}")
    figures.report("flight_entries_left", len(ground.flight_entries()), "= 0", names=ground.flight_entries())
    shared = ground.left_in_shared_memory()
    figures.report("shared_memory_left", len(shared), "= 0", names=shared[:10], private=ground.private)
    temporary = ground.left_in_temporary()
    figures.report("temporary_files_left", len(temporary), "= 0", names=temporary[:10])
    processes = [pid for run_id in soak.run_ids for pid in marked(run_id)]
    figures.report("processes_left", len(processes), "= 0", pids=processes)


async def run(soak: Soak) -> None:
    """
    Run the soak until it is done, or ended by Ctrl-C or SIGTERM. A shell starts jobs in the background without Ctrl-C.
    """
    task = asyncio.create_task(soak.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task


def main() -> int:
    """
    Soak, and print the figures; 1 if one missed its goal or the run failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of traffic (30)")
    parser.add_argument("--exporter-restarts", type=int, help="one for every 3 minutes, 3 at least")
    parser.add_argument("--vllm-restarts", type=int, help="one for every 10 minutes, 1 at least")
    parser.add_argument("--stops", type=int, help="stops of a worker: one for every 15 minutes, 1 at least")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the plan")
    options = parser.parse_args()
    minutes = options.minutes

    def given(value: int | None, every_minutes: float, least: int) -> int:
        return max(least, round(minutes / every_minutes)) if value is None else value

    vllm_restarts = given(options.vllm_restarts, 10, 1)
    events = plan_events(
        minutes * 60,
        exporter_restarts=given(options.exporter_restarts, 3, 3),
        vllm_restarts=vllm_restarts,
        stops=given(options.stops, 15, 1),
        seed=options.seed,
    )
    if not environment.default(os.environ).ready():
        progress("no lab environment: run `make lab-setup`")
        return 2
    enter_namespace()
    figures = Figures("soak")
    soak = Soak(minutes * 60, events, full_life(vllm_restarts))
    progress(f"soak: {len(events)} events in {minutes:g} minutes of traffic; logs in {soak.ground.work}")
    try:
        asyncio.run(run(soak))
        report(figures, soak)
    except (TimeoutError, EngineError) as error:
        figures.report("run", None, "= done", error=str(error), done=soak.done)
    except asyncio.CancelledError:
        progress("soak: ended early")
        return 130
    if not figures.exit_code:
        soak.ground.remove()
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
