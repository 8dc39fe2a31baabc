"""
Two deployments side by side, `baseline` and `canary`: engines, exporters and traffic, ended together.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import httpx2

from rankscope_lab import state
from rankscope_lab.checkpoint import Checkpoints
from rankscope_lab.engine import POLL_SECONDS, START_SECONDS, TELL_SECONDS, Engine, EngineError, EngineOptions
from rankscope_lab.environment import Environment
from rankscope_lab.processes import Child, started, sweep
from rankscope_lab.story import THIN, story
from rankscope_lab.traffic import Phase, Traffic

ROLES = ("baseline", "canary")
"""
The deployments; each is named after its role.
"""
SERVING, WEDGED = "serving", "wedged"
SILENCE_SECONDS = 4.0
"""
An engine with requests in flight that makes no token for so long is called wedged here. Rankscope itself knows sooner.
"""
EXPORTER_SECONDS, SERVER_SECONDS = 30.0, 90.0
WATCH_SECONDS = 1.0
REPORT_SECONDS = 30.0
FIRST_RANK, LAST_RANK = 0, 1


@dataclass(frozen=True, slots=True)
class LabOptions:
    """
    What `up` starts.
    """

    environment: Environment
    directory: Path
    """Where logs, checkpoints, targets and token lie."""
    flight_root: Path
    """Each deployment has a flight directory of its own below it."""
    exporter_ports: tuple[int, ...]
    hold_seconds: float
    pace_ms: float
    acceptance: float
    slots: int
    draft_tokens: int
    seed: int
    exporter: bool = True
    traffic: bool = True
    fixed: tuple[str, ...] = ()
    """Names of deployments that start with the trim fix on."""
    server_port: int | None = None
    """Where the dashboard listens; None: no dashboard."""
    open_browser: bool = False
    end_after: float | None = None
    """Seconds of traffic after which the lab ends by itself; None: it goes on until it is told."""


class LabError(RuntimeError):
    """
    The lab cannot start; the message says what to do.
    """


@dataclass(slots=True)
class Deployment:
    """
    One engine with its exporter and its traffic.
    """

    name: str
    engine: Engine
    exporter: Child | None
    exporter_port: int
    flight_dir: Path
    words: str = "starting"
    traffic: Traffic | None = None

    def state(self) -> state.DeploymentState:
        """
        What `status` shows of it.
        """
        children = [self.engine.child, *([self.exporter] if self.exporter else [])]
        total = self.traffic.result.total if self.traffic else None
        return state.DeploymentState(
            name=self.name,
            state=self.words,
            engine_url=self.engine.url,
            exporter_url=self.exporter_url if self.exporter else None,
            flight_dir=str(self.flight_dir),
            log=str(self.engine.child.log),
            run_ids=[child.run_id for child in children],
            requests=total.requests if total else 0,
            completed=total.completed if total else 0,
            timed_out=total.timed_out if total else 0,
            tokens=total.tokens if total else 0,
            wrong_tokens=total.wrong_tokens if total else 0,
        )

    @property
    def exporter_url(self) -> str:
        """Where its exporter listens."""
        return f"http://127.0.0.1:{self.exporter_port}"


def targets(names_and_urls: Sequence[tuple[str, str]], token_file: Path) -> str:
    """
    The server's configuration, as YAML: one deployment for each name, its role the same.
    """
    lines = ["# Written by the lab: `rankscope serve --config` takes it.", "deployments:"]
    for name, url in names_and_urls:
        lines += [
            f"  - name: {name}",
            f"    role: {name}",
            f"    exporters: [{url}]",
            f'    control_token_file: "{token_file}"',
        ]
    return "\n".join(lines) + "\n"


def cpus_for(deployment: int, available: Sequence[int]) -> tuple[int, ...]:
    """
    A processor for each rank: those of different deployments differ where there are enough.
    """
    return tuple(available[(2 * deployment + rank) % len(available)] for rank in (FIRST_RANK, LAST_RANK))


class Supervisor:
    """
    Starts the lab, tells what happens, and ends it.
    """

    def __init__(self, options: LabOptions, checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._phase = "starting"
        self._token_file = options.directory / "control-token"
        available = sorted(os.sched_getaffinity(0))
        self._deployments = [
            self._deployment(name, checkpoints, cpus_for(place, available), port)
            for place, (name, port) in enumerate(zip(ROLES, options.exporter_ports, strict=True))
        ]
        self._server = self._dashboard(options.server_port) if options.server_port else None

    async def run(self) -> None:
        """
        Everything, until this task is cancelled or `end_after` has passed.

        Raises:
            LabError: an engine or an exporter did not start.

        """
        self._write_files()
        self._say(
            f"starting both deployments (15 to 90 s each, as busy as the machine is); logs in {self._options.directory}"
        )
        try:
            self._start()
            await self._until_dashboard()
            await asyncio.gather(*(self._until_ready(deployment) for deployment in self._deployments))
            self._show()
            await self._serve()
        except EngineError as error:
            raise LabError(str(error)) from error
        finally:
            await self._end()

    def _deployment(self, name: str, checkpoints: Checkpoints, cpus: tuple[int, ...], port: int) -> Deployment:
        options = self._options
        flight_dir = options.flight_root / name
        engine = Engine(
            EngineOptions(
                python=options.environment.python,
                checkpoints=checkpoints,
                name=name,
                slots=options.slots,
                draft_tokens=options.draft_tokens,
                acceptance=options.acceptance,
                pace_ms=options.pace_ms,
                seed=options.seed,
                cpus=cpus,
                environment={
                    "RANKSCOPE_FLIGHT_DIR": str(flight_dir),
                    "RANKSCOPE_TRIM_FIX": "on" if name in options.fixed else "off",
                },
            ),
            options.directory / f"{name}.log",
        )
        exporter = None
        if options.exporter:
            command = [
                *(
                    str(options.environment.python),
                    "-m",
                    "rankscope_exporter",
                    "serve",
                    "--flight-dir",
                    str(flight_dir),
                ),
                *("--port", str(port), "--control-token-file", str(self._token_file)),
            ]
            exporter = Child(command, dict(os.environ), options.directory / f"{name}-exporter.log")
        return Deployment(name, engine, exporter, port, flight_dir)

    def _dashboard(self, port: int) -> Child:
        options = self._options
        command = [
            *(sys.executable, "-m", "rankscope_server", "serve", "--config", str(options.directory / "targets.yaml")),
            *("--port", str(port), "--data-dir", str(options.directory / "server")),
        ]
        return Child(command, dict(os.environ), options.directory / "server.log")

    async def _until_dashboard(self) -> None:
        if self._server is None:
            return
        port = self._options.server_port
        assert port is not None
        if not await asyncio.to_thread(_answers, port, SERVER_SECONDS, self._server):
            msg = f"the dashboard does not answer on port {port}; is it taken? --port names another\n{self._server.log_tail()}"
            raise LabError(msg)
        self._say(f"dashboard: http://127.0.0.1:{port}")

    def _show(self) -> None:
        """
        Lead to the page, now that it shows both engines.
        """
        if self._server is None:
            return
        url = f"http://127.0.0.1:{self._options.server_port}"
        self._say(f"both engines are on {url}: open `canary` there, turn the trim fix on, and compare")
        if self._options.open_browser:
            webbrowser.open(url)

    def _write_files(self) -> None:
        options = self._options
        options.directory.mkdir(parents=True, exist_ok=True)
        if not self._token_file.exists():
            descriptor = os.open(self._token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        options.flight_root.mkdir(parents=True, exist_ok=True)
        for deployment in self._deployments:
            shutil.rmtree(deployment.flight_dir, ignore_errors=True)
            deployment.flight_dir.mkdir(mode=0o700)
            deployment.engine.child.log.unlink(missing_ok=True)
        # A story begins at its beginning: what an earlier run was told to do must not turn the fix on in this one.
        shutil.rmtree(options.directory / "server", ignore_errors=True)
        pairs = [(deployment.name, deployment.exporter_url) for deployment in self._deployments]
        (options.directory / "targets.yaml").write_text(targets(pairs, self._token_file))
        self._save()

    def _save(self) -> None:
        mine = started(os.getpid())
        assert mine is not None
        port = self._options.server_port
        state.write(
            self._options.directory,
            state.LabState(
                pid=os.getpid(),
                started=mine,
                phase=self._phase,
                deployments=[deployment.state() for deployment in self._deployments],
                server_url=f"http://127.0.0.1:{port}" if port else None,
                server_run_ids=(self._server.run_id,) if self._server else (),
            ),
        )

    def _start(self) -> None:
        if self._server:
            self._server.start()
        for deployment in self._deployments:
            if deployment.exporter:
                deployment.exporter.start()
            deployment.engine.start()

    async def _until_ready(self, deployment: Deployment) -> None:
        began = told = time.monotonic()
        while not await asyncio.to_thread(deployment.engine.healthy):
            waited = time.monotonic() - began
            deployment.engine.check_starting(waited, START_SECONDS)
            self._check_exporter(deployment)
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                self._say(f"{deployment.name}: starting ({waited:.0f} s)")
            await asyncio.sleep(POLL_SECONDS)
        if deployment.exporter and not await asyncio.to_thread(
            _answers, deployment.exporter_port, EXPORTER_SECONDS, deployment.exporter
        ):
            msg = f"{deployment.name}: its exporter does not answer at {deployment.exporter_url}\n{deployment.exporter.log_tail()}"
            raise LabError(msg)
        deployment.words = "ready"
        self._say(f"{deployment.name}: ready after {time.monotonic() - began:.0f} s, {deployment.engine.url}")
        self._save()

    def _check_exporter(self, deployment: Deployment) -> None:
        if deployment.exporter and (status := deployment.exporter.exit_status()) is not None:
            msg = (
                f"{deployment.name}: its exporter ended with status {status}; is port {deployment.exporter_port} taken? "
                f"--exporter-ports names others\n{deployment.exporter.log_tail()}"
            )
            raise LabError(msg)

    async def _serve(self) -> None:
        options = self._options
        self._phase = "serving"
        self._save()
        if not options.traffic:
            self._say("both ready; no traffic (--no-traffic)")
        limit = asyncio.timeout(options.end_after)
        try:
            async with limit, asyncio.TaskGroup() as group:
                for deployment in self._deployments:
                    if options.traffic:
                        group.create_task(self._traffic(deployment))
                    group.create_task(self._watch(deployment))
                group.create_task(self._keep_state())
        except TimeoutError:
            if not limit.expired():
                raise
            self._say(f"{options.end_after:.0f} s are over")

    async def _traffic(self, deployment: Deployment) -> None:
        options = self._options
        plan = story(options.hold_seconds, seed=options.seed, slots=options.slots)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=plan.concurrency)
        async with httpx2.AsyncClient(
            base_url=deployment.engine.url, timeout=None, limits=limits, trust_env=False
        ) as client:
            deployment.traffic = Traffic(
                deployment.engine.url, plan, client=client, on_phase=lambda phase: self._tell_phase(deployment, phase)
            )
            await deployment.traffic.run()

    def _tell_phase(self, deployment: Deployment, phase: Phase) -> None:
        self._phase = phase.name
        if deployment is not self._deployments[0]:
            return
        if phase.name == THIN:
            self._say("traffic thins out: an engine without the trim fix wedges within seconds, one with it serves on")
        else:
            self._say(
                f"traffic runs: drift grows on the first rank of both engines. For {phase.seconds:.0f} s it holds the guard open; "
                "turn the trim fix on for the canary in that time"
            )

    async def _watch(self, deployment: Deployment) -> None:
        """
        Tell when the engine falls silent, answers again, or ends.
        """
        progress: tuple[int, float | None] = (0, None)
        since = told = time.monotonic()
        while (status := deployment.engine.child.exit_status()) is None:
            await asyncio.sleep(WATCH_SECONDS)
            if deployment.traffic is None:
                continue
            now, total = time.monotonic(), deployment.traffic.result.total
            seen: tuple[int, float | None] = (total.completed, progress[1])
            if seen == progress and now - since > SILENCE_SECONDS and deployment.traffic.in_flight:
                # Long answers take a while: an engine is silent only if it makes no tokens either.
                seen = (total.completed, await asyncio.to_thread(deployment.engine.generated_tokens))
            if seen != progress or not deployment.traffic.in_flight:
                if deployment.words == WEDGED:
                    self._say(f"{deployment.name}: answers again")
                deployment.words = SERVING
                progress, since = seen, now
            elif now - since > SILENCE_SECONDS and deployment.words != WEDGED:
                deployment.words = WEDGED
                await self._tell_wedge(deployment, now - since)
            if now - told > REPORT_SECONDS and deployment.words == SERVING:
                told = now
                self._say(
                    f"{deployment.name}: {total.completed} requests completed, {total.tokens} tokens, {total.wrong_tokens} of them wrong"
                )
        deployment.words = "ended"
        self._say(f"{deployment.name}: vLLM ended with status {status}; see {deployment.engine.child.log}")

    async def _tell_wedge(self, deployment: Deployment, silent: float) -> None:
        health = "200" if await asyncio.to_thread(deployment.engine.healthy) else "not 200"
        in_flight = deployment.traffic.in_flight if deployment.traffic else 0
        self._say(
            f"{deployment.name}: wedged. No answer and no token for {silent:.0f} s with {in_flight} requests in flight, and /health says {health}. "
            "Its trim fix was not on in time"
        )

    async def _keep_state(self) -> None:
        while True:
            await asyncio.sleep(2 * WATCH_SECONDS)
            self._save()

    async def _end(self) -> None:
        """
        End all children beside each other. A second Ctrl-C does not get in between.
        """
        self._say("ending both deployments")
        children = [
            self._server,
            *(child for each in self._deployments for child in (each.exporter, each.engine.child)),
        ]
        ending = asyncio.gather(*(asyncio.to_thread(child.stop) for child in children if child), return_exceptions=True)
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)
        for deployment in self._deployments:
            shutil.rmtree(deployment.flight_dir, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._options.flight_root.rmdir()
        state.path_in(self._options.directory).unlink(missing_ok=True)
        failures = [result for result in await ending if isinstance(result, Exception)]
        for failure in failures:
            self._say(str(failure))
        if not failures:
            self._say("ended; no process is left")


def _answers(port: int, seconds: float, child: Child) -> bool:
    """
    Whether `child` answers HTTP at this loopback port, within so many seconds and before it ends.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and child.exit_status() is None:
        connection = HTTPConnection("127.0.0.1", port, timeout=2)
        with contextlib.suppress(OSError, HTTPException):
            connection.request("GET", "/healthz")
            connection.getresponse()
            return True
        time.sleep(POLL_SECONDS)
    return False


@contextlib.contextmanager
def _cancelled_by_signals(task: "asyncio.Task[None]") -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def up(options: LabOptions, checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
    """
    Run the lab until Ctrl-C, SIGTERM, or its end; returns with every process gone.

    Raises:
        LabError: it runs already, or something did not start.

    """
    found = state.read(options.directory)
    if found and found.running():
        msg = f"a lab runs already in {options.directory} (process {found.pid}): use it, or end it with `python -m rankscope_lab down`"
        raise LabError(msg)
    if found:
        say("a lab that ran here before did not end properly: cleaning up")
        clean(found, options.flight_root)

    async def supervised() -> None:
        task = asyncio.ensure_future(Supervisor(options, checkpoints, say).run())
        with _cancelled_by_signals(task), contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(supervised())


def clean(found: state.LabState, flight_root: Path) -> int:
    """
    Kill what a lab that is gone left behind and remove its flight directories; returns how many processes that were.
    """
    killed = sum(sweep(run_id) for run_id in found.run_ids())
    for deployment in found.deployments:
        shutil.rmtree(deployment.flight_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        flight_root.rmdir()
    return killed
