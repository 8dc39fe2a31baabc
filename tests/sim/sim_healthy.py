"""
A deployment in good health, with every legitimate oddity, watched from start to end: what is found is a false alarm.
"""

from dataclasses import dataclass, field
from random import Random

import sim_oddities as odds
from sim_engine import MadeEngine, make_engine
from sim_exporter import MadeExporter, draw_troubles
from sim_oddities import Counts, Oddity
from sim_ranks import Toggle
from sim_shape import Shape, draw_shape
from sim_watch import DEPLOYMENT, Look, Watch, moment

from rankscope_exporter.contract import ControlOutcome, MitigationState
from rankscope_server.domain.model import FindingKind
from rankscope_server.domain.toggle import effective_step, refuse_delivery

TOGGLED = (MitigationState.AVAILABLE, MitigationState.APPLIED)


@dataclass(frozen=True, slots=True)
class Alarm:
    """
    Something that was said and is not so, or was not said though it is so.
    """

    seed: int
    at: float
    engine: str
    kind: str
    sentence: str


@dataclass(slots=True)
class Outcome:
    """
    What came of it.
    """

    steps: int = 0
    """Steps of which the records of every rank were compared."""
    looks: int = 0
    counts: Counts = field(default_factory=Counts)
    alarms: list[Alarm] = field(default_factory=list)
    """What was found although all was well."""
    unsaid: list[Alarm] = field(default_factory=list)
    """Looks at which an exporter was out of reach and the engine was not called blind."""

    def add(self, other: "Outcome") -> None:
        """
        Take another run's in.
        """
        self.steps += other.steps
        self.looks += other.looks
        self.counts.update(other.counts)
        self.alarms += other.alarms
        self.unsaid += other.unsaid


def make_exporters(shape: Shape, random: Random, counts: Counts) -> list[MadeExporter]:
    """
    An exporter for each node, each on clocks of its own.
    """
    return [
        MadeExporter(node, random, counts, random.randrange(10**12, 10**15), random.uniform(-2, 2))
        for node in range(shape.nodes)
    ]


@dataclass(slots=True)
class HealthyRun:
    """
    One deployment whose engine is restarted now and then, and how it is judged.
    """

    seed: int
    steps: int
    outcome: Outcome = field(default_factory=Outcome)
    _engines: dict[str, MadeEngine] = field(default_factory=dict)
    _exporters: list[MadeExporter] = field(default_factory=list)
    _watch: Watch | None = None
    _toggle_at: float = 0.0
    _generation: int = 0

    def run(self) -> Outcome:
        """
        Watch it all.
        """
        random, counts = Random(self.seed), self.outcome.counts
        shape = draw_shape(random)
        self._exporters = make_exporters(shape, random, counts)
        end = self._make_engines(shape, random)
        for exporter in self._exporters:
            draw_troubles(exporter, end)
        since = 0.0
        if random.random() < 0.2:
            first = next(iter(self._engines.values()))
            since = random.uniform(first.born, first.last_end)
            counts[Oddity.FROM_MIDDLE] += 1
        self._toggle_at = since + random.expovariate(1 / odds.TOGGLE_SECONDS)
        self._watch = Watch(self._exporters, random, counts, self._judge, since)
        self._watch.run(end)
        self.outcome.looks = self._watch.looks
        for engine in self._engines.values():
            known = [tape.delivered for tape in engine.tapes]
            self.outcome.steps += int(sum(sum(known[1:], start=known[0].astype(int)) == len(known)))
        return self.outcome

    def _make_engines(self, shape: Shape, random: Random) -> float:
        """
        The engines, one after the other, and the second at which the last one ends.
        """
        counts = self.outcome.counts
        starts = random.choice((1, 1, 2, 3))
        born = random.uniform(0.0, 5.0)
        for number in range(starts):
            name = f"e{self.seed}-{number}"
            clocks = [exporter.clock_ns for exporter in self._exporters]
            engine = make_engine(name, shape, self.steps // starts, born, clocks, random, counts)
            self._engines[name] = engine
            for tape in engine.tapes:
                self._exporters[tape.node].tapes.append(tape)
            busy = random.random() < 0.5
            counts[Oddity.SHUTDOWN_BUSY if busy else Oddity.SHUTDOWN_IDLE] += 1
            gone = engine.shut_down(
                engine.last_end + (random.uniform(0.01, 0.5) if busy else random.uniform(4, 20)), random
            )
            retention = random.uniform(20, 120)
            for tape in engine.tapes:
                tape.removed = gone + retention
            counts[Oddity.RESTART] += number > 0
            born = gone + random.uniform(2, 60)
        return born

    def _judge(self, look: Look) -> bool:
        name = look.engine.engine
        for key, finding in look.after.findings.items():
            if key not in look.before.findings and finding.kind is not FindingKind.BLIND:
                self.outcome.alarms.append(Alarm(self.seed, look.at, name, finding.kind.value, finding.sentence))
        said = look.after.findings.get((FindingKind.BLIND, -1))
        was = (FindingKind.BLIND, -1) in look.before.findings
        if said is not None and not was:
            if look.blind_due:
                self.outcome.counts[Oddity.BLIND_DUE] += 1
            else:
                self.outcome.alarms.append(Alarm(self.seed, look.at, name, "blind", said.sentence))
        if said is None and look.blind_due:
            self.outcome.unsaid.append(Alarm(self.seed, look.at, name, "blind", "not said"))
        if look.at >= self._toggle_at:
            self._toggle(look)
        return False

    def _toggle(self, look: Look) -> None:
        """
        Turn the trim fix on or off as the server does, where that changes nothing but the fix.
        """
        engine, watch = self._engines[look.engine.engine], self._watch
        assert watch is not None
        shape, random = engine.shape, watch.random
        current = engine.tapes[0].mitigation(look.at)
        pending = any(t.toggles and t.control(look.at).acted_step != t.toggles[-1].acts_at for t in engine.tapes)
        drifts = shape.spec_tokens > 0 and shape.asynchronous  # without the fix it would not be healthy
        if current not in TOGGLED or drifts or pending or look.engine.ended or look.engine.missing:
            return
        if any(exporter.outage(look.at) or exporter.outage(look.at + 0.1) for exporter in self._exporters):
            return  # it would not be delivered everywhere
        if refuse_delivery(look.engine, look.after, moment(look.at)):
            return
        track = next(watch.fleet.tracks(DEPLOYMENT, engine.name))
        step = effective_step(look.engine, track.rate(), moment(look.at))
        puts = [look.at + random.uniform(0.005, 0.1) for _ in self._exporters]
        acts = {max(step, tape.newest(puts[tape.node]) + 1) for tape in engine.tapes}
        if len(acts) > 1:
            return  # a word that comes late parts the ranks for some steps: then mixed is what they are
        self._generation += 1
        desired = current is MitigationState.AVAILABLE
        after = MitigationState.APPLIED if desired else MitigationState.AVAILABLE
        (acts_at,) = acts
        for tape in engine.tapes:
            tape.toggles.append(
                Toggle(
                    puts[tape.node], self._generation, desired, step, acts_at, ControlOutcome.APPLIED, current, after
                )
            )
            tape.records["mitigation"][acts_at - 1 :] = after
            tape.records["generation"][acts_at - 1 :] = self._generation
        self.outcome.counts[Oddity.TOGGLE] += 1
        self._toggle_at = look.at + random.expovariate(1 / odds.TOGGLE_SECONDS)


def run_healthy(seed: int, steps: int) -> Outcome:
    """
    One deployment that takes so many steps in all.
    """
    return HealthyRun(seed, steps).run()
