"""
What is known now: findings, views, and the version that goes up as they change. Nothing here waits for anything.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import anyio
import structlog

from rankscope_server.control.reconcile import wanted_of
from rankscope_server.control.reports import Reports
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, ExporterFacts
from rankscope_server.domain.findings import STICKY, EngineMemory, assess
from rankscope_server.domain.model import (
    AuditRow,
    DeploymentRole,
    EngineCard,
    EngineView,
    Finding,
    FindingKind,
    FleetView,
)
from rankscope_server.domain.ports import TogglePlan
from rankscope_server.domain.toggle import plan_toggle
from rankscope_server.domain.view import (
    EngineContext,
    Wanted,
    build_deployment,
    build_engine,
    build_engine_card,
    has_drift,
    needs,
)
from rankscope_server.ingest.clock import Clock
from rankscope_server.ingest.tracks import Fleet
from rankscope_server.store import DesiredRow

logger = structlog.get_logger("rankscope.board")

View = TypeVar("View")


@dataclass(frozen=True, slots=True)
class FindingEvent:
    """
    A finding that opened or closed.
    """

    deployment: str
    engine: str
    finding: Finding
    opened: bool
    at_unix: float


@dataclass(slots=True)
class Board:
    """
    Everything that answers reads.
    """

    fleet_of: Fleet
    roles: dict[str, DeploymentRole]
    clock: Clock
    reports: Reports
    version: int = 1
    closing: bool = False
    engines: dict[str, list[EngineFacts]] = field(default_factory=dict)
    memories: dict[tuple[str, str], EngineMemory] = field(default_factory=dict)
    desired: list[DesiredRow] = field(default_factory=list)
    audit: list[AuditRow] = field(default_factory=list)
    """Newest first, as many as pages show."""
    problems: dict[str, str] = field(default_factory=dict)
    """What is wrong with the server itself, by subject."""
    events: list[FindingEvent] = field(default_factory=list)
    """What opened and closed since the store took it last."""
    _views: dict[object, object] = field(default_factory=dict)
    _changed: anyio.Event = field(default_factory=anyio.Event)

    def bump(self) -> None:
        """
        Something that a page shows may have changed.
        """
        self.version += 1
        self._views.clear()
        self._changed.set()
        self._changed = anyio.Event()

    def close(self) -> None:
        """
        End every stream.
        """
        self.closing = True
        self._changed.set()

    async def wait_newer(self, version: int, timeout_seconds: float) -> int:
        """
        Wait until `self.version` is above `version`, at most `timeout_seconds`; the version that holds then.
        """
        with anyio.move_on_after(timeout_seconds):
            while self.version <= version and not self.closing:
                await self._changed.wait()
        return self.version

    def judge(self, deployments: Iterable[str]) -> None:
        """
        Look at the engines of some deployments anew.
        """
        now = self.clock.now()
        for deployment in deployments:
            engines = self.fleet_of.engines(deployment)
            self.engines[deployment] = engines
            for engine in engines:
                key = (deployment, engine.engine)
                before = self.memories.get(key, EngineMemory())
                try:
                    after = assess(engine, before, now)
                    self.problems.pop(f"judge {key}", None)
                except Exception as error:  # one engine that cannot be judged must not keep the others from it
                    logger.exception("engine.judge_crashed", deployment=deployment, engine=engine.engine)
                    self.problems[f"judge {key}"] = (
                        f"engine {engine.engine} of {deployment} cannot be judged ({type(error).__name__}): see the server's log, and report it"
                    )
                    continue
                self.memories[key] = after
                self._note(key, before, after, now.unix)
            exporters = [track.facts() for track in self.fleet_of.of(deployment)]
            self._report(deployment, engines, exporters, now)
            if not all(exporter.reached(now) for exporter in exporters):
                continue  # an engine that is not seen, or not yet, is not the same as one that is gone
            known = {engine.engine for engine in engines}
            for key in [key for key in self.memories if key[0] == deployment and key[1] not in known]:
                self._note(key, self.memories.pop(key), EngineMemory(), now.unix)

    def _report(self, deployment: str, engines: list[EngineFacts], exporters: list[ExporterFacts], now: Moment) -> None:
        name = f"report {deployment}"
        try:
            self.reports.observe(deployment, [(engine, self.memory(engine)) for engine in engines], exporters, now)
            self.problems.pop(name, None)
        except Exception as error:  # what cannot be reported of one deployment must not hide the others
            logger.exception("deployment.report_crashed", deployment=deployment)
            self.problems[name] = (
                f"incidents and alerts of {deployment} cannot be followed ({type(error).__name__}): see the server's log, and report it"
            )

    def _note(self, key: tuple[str, str], before: EngineMemory, after: EngineMemory, at_unix: float) -> None:
        for name, finding in after.findings.items():
            if name not in before.findings:
                logger.warning(
                    "finding.opened",
                    deployment=key[0],
                    engine=key[1],
                    kind=finding.kind.value,
                    sentence=finding.sentence,
                )
                self.events.append(FindingEvent(*key, finding, opened=True, at_unix=at_unix))
        for name, finding in before.findings.items():
            if name not in after.findings:
                logger.info("finding.closed", deployment=key[0], engine=key[1], kind=finding.kind.value)
                self.events.append(FindingEvent(*key, finding, opened=False, at_unix=at_unix))
        del self.events[:-10_000]  # a store that is away for long loses the oldest

    def restore(self, found: Iterable[tuple[str, str, Finding]]) -> None:
        """
        Take back what an earlier run of the server found and what holds for an engine's life.
        """
        for deployment, engine, finding in found:
            if finding.kind in STICKY and finding.ranks:
                memory = self.memories.get((deployment, engine), EngineMemory())
                findings = {(finding.kind, finding.ranks[0].dp_rank): finding, **memory.findings}
                self.memories[deployment, engine] = replace(memory, findings=findings)

    def memory(self, engine: EngineFacts) -> EngineMemory:
        """
        What is remembered of an engine.
        """
        return self.memories.get((engine.deployment, engine.engine), EngineMemory())

    def drifts(self, deployment: str) -> bool:
        """
        Whether requests of a deployment are worth asking for.
        """
        return any(has_drift(self.memory(engine)) for engine in self.engines.get(deployment, ()))

    def rate(self, engine: EngineFacts) -> float | None:
        """
        Steps per second of an engine that runs; 0 while it idles, None where it is not known.
        """
        if engine.ended or any(rank.in_flight and rank.quiet_seconds > 5 for rank in engine.ranks) or engine.idle:
            return 0.0 if engine.newest_step else None
        rates = [
            rate
            for track in self.fleet_of.tracks(engine.deployment, engine.engine)
            if (rate := track.rate()) is not None
        ]
        return max(rates, default=None)

    def find(self, deployment: str, engine: str | None) -> list[EngineFacts] | None:
        """
        The engines that a name means; None where there is no such thing. All engines: those that have not ended.
        """
        if deployment not in self.roles:
            return None
        engines = self.engines.get(deployment, [])
        if engine is None:
            return [facts for facts in engines if not facts.ended] or [facts for facts in engines if not facts.replaced]
        return [facts for facts in engines if facts.engine == engine] or None

    def plan(self, deployment: str, engine: str | None, *, desired: bool) -> TogglePlan | None:
        """
        What a toggle would do.
        """
        engines = self.find(deployment, engine)
        if engines is None:
            return None
        return plan_toggle(
            deployment,
            engines,
            memories={facts.engine: self.memory(facts) for facts in engines},
            rates={facts.engine: self.rate(facts) for facts in engines},
            now=self.clock.now(),
            desired=desired,
        )

    def engine(self, deployment: str, engine: str) -> EngineView | None:
        """
        The engine page.
        """
        return self._cached(("engine", deployment, engine), lambda: self._engine(deployment, engine))

    def _engine(self, deployment: str, engine: str) -> EngineView | None:
        found = self.find(deployment, engine)
        on, off = self.plan(deployment, engine, desired=True), self.plan(deployment, engine, desired=False)
        if not found or on is None or off is None:
            return None
        row = wanted_of(self.desired, deployment, engine)
        tracks = self.fleet_of.tracks(deployment, engine)
        still = self.rate(found[0]) == 0.0
        context = EngineContext(
            role=self.roles[deployment],
            memory=self.memory(found[0]),
            rates={track.report.key: 0.0 if still else track.rate() for track in tracks},
            wanted=None if row is None else Wanted(row.desired, row.generation, row.actor, row.at_unix),
            on=on,
            off=off,
            audit=tuple(
                entry for entry in self.audit if entry.deployment == deployment and entry.engine in {"", engine}
            )[:50],
            forecast=self.reports.forecast(deployment, engine),
            incident=self.reports.incidents.open_on(deployment, engine),
        )
        return build_engine(found[0], context, self.clock.now())

    def fleet(self) -> FleetView:
        """
        The fleet page.
        """
        return self._cached("fleet", self._fleet)

    def _fleet(self) -> FleetView:
        now = self.clock.now()
        cards = []
        for name, role in self.roles.items():
            exporters = self.fleet_of.of(name)
            engines = self.engines.get(name, [])
            live = [facts for facts in engines if not facts.replaced]
            cards.append(
                build_deployment(
                    name,
                    role,
                    [(facts, self._card(facts, now)) for facts in engines],
                    exporters=[exporter.facts() for exporter in exporters],
                    unreadable=[
                        f"unreadable flight file: {text}" for exporter in exporters for text in exporter.unreadable
                    ],
                    sparkline=self.fleet_of.sparkline(live, now),
                    now=now,
                )
            )
        return FleetView(now.unix, tuple(sorted(cards, key=needs)), self.all_problems())

    def _card(self, facts: EngineFacts, now: Moment) -> EngineCard:
        return build_engine_card(
            facts,
            self.memory(facts),
            self.rate(facts),
            now,
            forecast=self.reports.forecast(facts.deployment, facts.engine),
            incident=self.reports.incidents.open_on(facts.deployment, facts.engine),
        )

    def all_problems(self) -> tuple[str, ...]:
        """
        What is wrong with the server itself, each with the remedy.
        """
        return (*self.problems.values(), *self.reports.problems())

    def _cached(self, key: object, make: Callable[[], View]) -> View:
        if key not in self._views:
            self._views[key] = make()
        return self._views[key]  # type: ignore[return-value]

    def open_findings(self) -> dict[tuple[str, FindingKind], int]:
        """
        How many findings are open, by deployment and kind.
        """
        counts: dict[tuple[str, FindingKind], int] = {}
        for (deployment, _), memory in self.memories.items():
            for kind, _dp in memory.findings:
                counts[deployment, kind] = counts.get((deployment, kind), 0) + 1
        return counts
