"""
The server at work: polls, judges, keeps, reconciles, and answers pages and API.
"""

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import httpx2
import structlog

from rankscope_exporter.contract import ControlCommand
from rankscope_server.control.board import Board
from rankscope_server.control.charts import build_series, clamp_span
from rankscope_server.control.commands import send_everywhere
from rankscope_server.control.reconcile import plan_reconcile, wanted_of
from rankscope_server.domain.alert import AlertsView
from rankscope_server.domain.facts import EngineFacts, joined
from rankscope_server.domain.findings import STICKY
from rankscope_server.domain.fix import acknowledged, build_progress, requested_generation
from rankscope_server.domain.incident import IncidentCard, IncidentView
from rankscope_server.domain.model import AuditRow, EngineView, FleetView, Series
from rankscope_server.domain.ports import ToggleOutcome, TogglePlan
from rankscope_server.domain.toggle import effective_step, next_generation
from rankscope_server.ingest.clock import Clock
from rankscope_server.ingest.poller import Poller
from rankscope_server.store import DesiredRow, SampleRow, Store, StoreError, StoreVersionError

logger = structlog.get_logger("rankscope.service")

PULSE_SECONDS = 0.05
"""
Pause after a look at the fleet: answers that arrive meanwhile are judged together.
"""
RECONCILE_SECONDS = 1.0
ECHO_SECONDS = 4.0
"""
A command that was taken is not sent again before the ranks could have told of it.
"""
KEEP_SECONDS = 2.0
RETENTION_SWEEP_SECONDS = 600.0
LATE_SECONDS = 5
"""
A second is kept when it is this far past: records of it may still be on their way.
"""
SAMPLES_HELD = 200_000

OWN_NAME = "rankscope"
"""
Actor of what the server does by itself.
"""


class Service:
    """
    Implements `domain.ports.Rankscope`.
    """

    def __init__(
        self,
        board: Board,
        pollers: Sequence[Poller],
        clients: Mapping[str, httpx2.AsyncClient],
        clock: Clock,
        *,
        open_store: Callable[[], Awaitable[Store]],
        retention_seconds: float,
    ) -> None:
        self.board = board
        self.pollers = pollers
        self.store: Store | None = None
        self._clients = clients
        self._clock = clock
        self._open_store = open_store
        self._retention_seconds = retention_seconds
        self._dirty = set(board.roles)
        self._dirtied = anyio.Event()
        self._toggling = anyio.Lock()
        self._noted: set[tuple[str, int]] = set()
        self._sent: dict[tuple[str, str], tuple[int, float]] = {}
        """Generation and time of what every exporter of an engine took: their next answer shows it, and not before."""
        self._told: dict[tuple[str, str], str] = {}
        self._samples: list[SampleRow] = []
        self._swept = float("-inf")

    # -- reads

    @property
    def version(self) -> int:
        """Goes up whenever something that a page shows may have changed."""
        return self.board.version

    @property
    def closing(self) -> bool:
        """Whether the server is shutting down."""
        return self.board.closing

    async def wait_newer(self, version: int, timeout_seconds: float) -> int:
        """
        Wait until the version is above `version`, at most `timeout_seconds`.
        """
        return await self.board.wait_newer(version, timeout_seconds)

    def fleet(self) -> FleetView:
        """
        The fleet page.
        """
        return self.board.fleet()

    def engine(self, deployment: str, engine: str) -> EngineView | None:
        """
        The engine page.
        """
        return self.board.engine(deployment, engine)

    def plan_toggle(self, deployment: str, engine: str | None, *, desired: bool) -> TogglePlan | None:
        """
        What a toggle would do.
        """
        return self.board.plan(deployment, engine, desired=desired)

    async def series(
        self, deployment: str, engine: str, since_unix: float, until_unix: float, max_points: int
    ) -> Series:
        """
        Largest drift per rank over time.
        """
        since, until = clamp_span(since_unix, until_unix, self._clock.now().unix)
        tracks = list(self.board.fleet_of.tracks(deployment, engine))
        held = min((track.seconds.first for track in tracks if track.seconds.first), default=until)
        stored: list[SampleRow] = []
        if self.store is not None and since < held:
            try:
                stored = await self.store.samples(deployment, engine, since, until)
            except StoreError as error:
                self.board.problems["store"] = str(error)
        return build_series(tracks, stored, since, until, max_points)

    async def audit(self, limit: int, deployment: str | None = None) -> tuple[AuditRow, ...]:
        """
        What was done, newest first: from the store, or what is in memory where that fails.
        """
        if self.store is not None:
            try:
                return tuple(await self.store.audit(limit, deployment))
            except StoreError as error:
                self.board.problems["store"] = str(error)
        return tuple(row for row in self.board.audit if deployment in {None, row.deployment})[: max(0, limit)]

    async def incidents(self, limit: int, deployment: str | None = None) -> tuple[IncidentCard, ...]:
        """
        Incidents, those that are not closed first.
        """
        return await self.board.reports.incidents.cards(limit, deployment)

    async def incident(self, incident: str) -> IncidentView | None:
        """
        The page of an incident.
        """
        return await self.board.reports.incidents.view(incident)

    async def capture(self, incident: str, number: int) -> bytes | None:
        """
        A frozen copy of flight records.
        """
        return await self.board.reports.incidents.capture(incident, number)

    async def alerts(self) -> AlertsView:
        """
        The alerts page.
        """
        return self.board.reports.alerts.view()

    # -- loops

    async def start(self) -> None:
        """
        Open the store; without it the server still watches.

        Raises:
            StoreVersionError: a newer server made the store.

        """
        await self._connect()
        if self.store is not None:
            try:
                await self.board.reports.restore(self.store)
            except StoreError as error:  # `keep` tries again
                self._store_fails(error)

    async def run(self) -> None:
        """
        Work until cancelled.
        """
        async with anyio.create_task_group() as tasks:
            for poller in self.pollers:
                tasks.start_soon(poller.run)
            tasks.start_soon(self.board.reports.alerts.run)
            tasks.start_soon(self._pulse)
            tasks.start_soon(self._every, RECONCILE_SECONDS, self.reconcile)
            tasks.start_soon(self._every, KEEP_SECONDS, self.keep)

    async def close(self) -> None:
        """
        End streams, keep what is not kept yet, let go of the store and of connections.
        """
        self.board.close()
        for client in set(self._clients.values()):
            await client.aclose()
        if self.store is not None:
            await self.keep()
        await self.board.reports.alerts.close()
        if self.store is not None:
            await self.store.close()

    def note_change(self, deployment: str) -> None:
        """
        An exporter of a deployment has answered, or failed to.
        """
        self._dirty.add(deployment)
        self._dirtied.set()

    async def _pulse(self) -> None:
        while True:
            with anyio.move_on_after(1.0):  # ages grow and limits pass although nothing arrives
                await self._dirtied.wait()
            try:
                self.look()
            except Exception as error:  # noqa: BLE001  told below; the next look may go well
                self._loop_fails("look", error)
            await self._clock.sleep(PULSE_SECONDS)

    def look(self) -> None:
        """
        Judge what has changed, all of it if nothing has: time has passed for everything.
        """
        self._dirtied = anyio.Event()
        dirty, self._dirty = self._dirty or set(self.board.roles), set()
        self.board.judge(dirty)
        self.board.bump()

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  told below; the next round may go well
                self._loop_fails(getattr(work, "__name__", "?"), error)
            await self._clock.sleep(seconds)

    def _loop_fails(self, name: str, error: Exception) -> None:
        self.board.problems["loop"] = f"{name} failed ({type(error).__name__}): see the server's log, and report it"
        with contextlib.suppress(OSError, ValueError):  # a log that cannot be written stops no watching
            logger.error("loop.crashed", loop=name, exc_info=error)

    # -- the store

    async def _connect(self) -> None:
        store: Store | None = None
        try:
            store = await self._open_store()
            self.board.desired = await store.desired()
            self.board.audit = await store.audit(500)
            self._noted = await store.acknowledged()
            found = await store.open_findings()
            self.board.restore(found)
            for deployment, engine, finding in found:
                if finding.kind not in STICKY:  # if it still holds it opens again
                    await store.close_finding(deployment, engine, finding.kind.value, self._clock.now().unix)
            self.store = store
        except StoreVersionError:
            raise
        except StoreError as error:
            self._store_fails(error)
            return
        finally:
            if store is not None and self.store is not store:
                await store.close()
        self.board.problems.pop("store", None)

    def _store_fails(self, error: StoreError) -> None:
        text = f"{error}. Watching and alerting go on. What is not kept by a restart of the server is lost: charts, incidents, and which alerts were told. The fix cannot be toggled until then."
        if self.board.problems.get("store") != text:
            logger.error("store.failed", error=str(error))
        self.board.problems["store"] = text

    async def keep(self) -> None:
        """
        Put samples and findings into the store; what cannot be put there now is put there later.
        """
        self._collect_samples()
        if self.store is None:
            await self._connect()
        if self.store is None:
            await self.board.reports.keep(None)
            return
        now = self._clock.now()
        try:
            samples = self._samples
            await self.store.add_samples(samples)
            self._samples = self._samples[len(samples) :]
            while self.board.events:
                event = self.board.events[0]
                if event.opened:
                    await self.store.open_finding(event.deployment, event.engine, event.finding, event.at_unix)
                else:
                    await self.store.close_finding(
                        event.deployment, event.engine, event.finding.kind.value, event.at_unix
                    )
                if self.board.events and self.board.events[0] is event:
                    del self.board.events[0]
            await self.board.reports.keep(self.store)
            if now.monotonic - self._swept > RETENTION_SWEEP_SECONDS:
                await self.store.remove_samples(int(now.unix - self._retention_seconds))
                self._swept = now.monotonic
        except StoreError as error:
            self._store_fails(error)
            return
        self.board.problems.pop("store", None)

    def _collect_samples(self) -> None:
        until = int(self._clock.now().unix) - LATE_SECONDS
        for exporter in self.board.fleet_of.exporters.values():
            for track in exporter.ranks.values():
                engine = track.report.identity.engine
                self._samples += [
                    SampleRow(
                        exporter.deployment, engine, track.id, s.second, s.drift_max, s.state_max, s.steps, s.requests
                    )
                    for s in track.seconds.take(until)
                ]
        del self._samples[:-SAMPLES_HELD]

    async def _record(self, row: AuditRow, generation: int = 0) -> None:
        self.board.audit.insert(0, row)
        del self.board.audit[500:]
        self.board.bump()
        if self.store is None:
            return
        try:
            await self.store.add_audit(row, generation)
        except StoreError as error:
            self._store_fails(error)

    # -- the fix

    async def toggle(self, deployment: str, engine: str | None, *, desired: bool, actor: str) -> ToggleOutcome:
        """
        Turn the trim fix on or off.
        """
        async with self._toggling:
            action = f"turn the trim fix {'on' if desired else 'off'}"
            plan = self.plan_toggle(deployment, engine, desired=desired)
            refusal = (
                f"there is no {'deployment' if engine is None else 'engine'} of this name"
                if plan is None
                else plan.refusal
            )
            if not refusal and self.store is None:
                refusal = f"who did it cannot be recorded: {self.board.problems.get('store', 'the store is not open')}"
            if plan is None or refusal:
                await self._record(
                    self._row(actor, deployment, engine or "", action, detail="", outcome=f"refused: {refusal}")
                )
                return ToggleOutcome(accepted=False, reason=refusal, generation=None, effective_step=None)
            return await self._toggle(deployment, engine, plan, action, actor)

    async def _toggle(
        self, deployment: str, engine: str | None, plan: TogglePlan, action: str, actor: str
    ) -> ToggleOutcome:
        live = self.board.find(deployment, None) or []
        concerned = [facts for facts in self.board.engines.get(deployment, []) if facts.engine in plan.engines]
        try:
            generation = next_generation(
                max((row.generation for row in self.board.desired if row.deployment == deployment), default=0), live
            )
        except ValueError as error:
            await self._record(
                self._row(actor, deployment, engine or "", action, detail="", outcome=f"refused: {error}")
            )
            return ToggleOutcome(accepted=False, reason=str(error), generation=None, effective_step=None)
        # What is said about the only engine of a deployment is meant for its successors, too: vLLM's restart makes a new one.
        scope = "" if engine is None or len(live) == 1 else engine
        now = self._clock.now()
        desired = DesiredRow(deployment, scope, plan.desired, generation, actor, now.unix)
        row = self._row(
            actor,
            deployment,
            scope or (engine or ""),
            action,
            detail=f"{joined(plan.ranks)}; {plan.timing}",
            outcome=f"accepted as generation {generation}",
        )
        assert self.store is not None
        try:
            await self.store.save_toggle(desired, row)
        except StoreError as error:
            self._store_fails(error)
            reason = f"who did it cannot be recorded: {error}"
            return ToggleOutcome(accepted=False, reason=reason, generation=None, effective_step=None)
        kept = [r for r in self.board.desired if r.deployment != deployment or (scope and r.engine != scope)]
        self.board.desired = [*kept, desired]
        self.board.audit.insert(0, row)
        asked = f"Turning the trim fix {'on' if desired.desired else 'off'} was asked for by {actor}: {plan.timing.rstrip('.')}."
        self.board.reports.incidents.note(deployment, scope, "asked", asked, now.unix)
        steps: list[int] = []
        unsent: list[str] = []
        for facts in concerned:
            step = effective_step(facts, self.board.rate(facts), self._clock.now())
            steps.append(step)
            unsent += await self._send(facts, [exporter.url for exporter in facts.exporters], desired, step)
        if unsent:
            await self._record(
                self._row(
                    OWN_NAME,
                    deployment,
                    scope,
                    "deliver",
                    detail=f"generation {generation}",
                    outcome=f"not taken: {'; '.join(unsent)}",
                )
            )
        self._hurry(deployment)
        self.board.bump()
        when = "act at the same step of their engine"
        if len(concerned) == 1:
            when = f"act at step {steps[0]}" if steps[0] else "act at their next step"
        reason = f"Sent to {joined(plan.ranks)}: all {when}."
        if unsent:
            reason = f"{len(unsent)} of the exporters did not take it ({unsent[0]}); it is sent again each second."
        return ToggleOutcome(
            accepted=True,
            reason=reason,
            generation=generation,
            effective_step=max(steps, default=None),
            unsent=tuple(unsent),
        )

    async def _send(self, facts: EngineFacts, urls: Sequence[str], wanted: DesiredRow, step: int) -> tuple[str, ...]:
        command = ControlCommand(
            engine=facts.engine, desired=wanted.desired, generation=wanted.generation, effective_step=step
        )
        errors = await send_everywhere(self._clients, urls, command)
        if not errors:
            self._sent[facts.deployment, facts.engine] = (wanted.generation, self._clock.now().monotonic)
        logger.info(
            "command.sent",
            engine=facts.engine,
            desired=wanted.desired,
            generation=wanted.generation,
            effective_step=step,
            errors=errors,
        )
        return errors

    async def reconcile(self) -> None:
        """
        Bring every engine to what is wanted of it: one that came up anew, ranks that a command did not reach.
        """
        async with self._toggling:
            for deployment, engines in list(self.board.engines.items()):
                for facts in engines:
                    await self._reconcile(deployment, facts)
                    await self._acknowledge(deployment, facts)

    async def _reconcile(self, deployment: str, facts: EngineFacts) -> None:
        wanted = wanted_of(self.board.desired, deployment, facts.engine)
        now = self._clock.now()
        step = plan_reconcile(facts, wanted, self.board.memory(facts), self.board.rate(facts), now)
        if wanted is None or not step.send:
            return
        generation, at = self._sent.get((deployment, facts.engine), (0, 0.0))
        if generation == wanted.generation and now.monotonic - at < ECHO_SECONDS:
            return
        if step.anew:
            if self.store is None:
                return
            generation = next_generation(
                max(r.generation for r in self.board.desired if r.deployment == deployment), [facts]
            )
            newer = DesiredRow(deployment, wanted.engine, wanted.desired, generation, wanted.actor, wanted.at_unix)
            try:
                await self.store.save_generation(newer)
            except StoreError as error:
                self._store_fails(error)
                return
            self.board.desired = [newer if row is wanted else row for row in self.board.desired]
            wanted = newer
        errors = await self._send(facts, step.exporters, wanted, step.effective_step)
        outcome = f"not taken: {'; '.join(errors)}" if errors else "sent"
        when = "at once" if step.effective_step == 0 else f"at step {step.effective_step}"
        key = (deployment, facts.engine)
        if self._told.get(key) != f"{wanted.generation} {outcome}":  # each outcome once, not each second
            self._told[key] = f"{wanted.generation} {outcome}"
            action = f"turn the trim fix {'on' if wanted.desired else 'off'} again"
            detail = f"{step.reason}; {joined(r.label for r in facts.ranks)} {when}, generation {wanted.generation}, as {wanted.actor} asked"
            await self._record(self._row(OWN_NAME, deployment, facts.engine, action, detail=detail, outcome=outcome))
        self._hurry(deployment)

    async def _acknowledge(self, deployment: str, facts: EngineFacts) -> None:
        generation = requested_generation(facts)
        key = (facts.engine, generation)
        if generation == 0 or key in self._noted or not all(acknowledged(rank, generation) for rank in facts.ranks):
            return
        progress = build_progress(facts)
        if progress is None:
            return
        self._noted.add(key)
        outcome = "; ".join(f"{label} {done}" for label, done in progress.per_rank)
        row = self._row(
            OWN_NAME, deployment, facts.engine, "acknowledged", detail=f"generation {generation}", outcome=outcome
        )
        await self._record(row, generation)

    def _row(self, actor: str, deployment: str, engine: str, action: str, *, detail: str, outcome: str) -> AuditRow:
        # Names may come from an address that somebody typed: no longer than the store has room for.
        return AuditRow(self._clock.now().unix, actor[:128], deployment[:64], engine[:256], action, detail, outcome)

    def _hurry(self, deployment: str) -> None:
        for poller in self.pollers:
            if poller.track.deployment == deployment:
                poller.hurry()
