"""
One fault in the traffic of one engine, and what was said of it.
"""

from dataclasses import dataclass, field
from random import Random

from sim_engine import make_engine
from sim_exporter import clear_outages, draw_troubles
from sim_faults import Fault, FaultKind, Ground, finish
from sim_healthy import make_exporters
from sim_oddities import Counts
from sim_ranks import Tape
from sim_shape import changed, draw_shape
from sim_watch import Look, Watch

from rankscope_server.domain.findings import STICKY
from rankscope_server.domain.model import FindingKind, RankId

STEPS = (160, 400)
FIRST_STEP, LAST_STEPS = 60, 40
"""
Steps at the start, and at the end, into which nothing is put.
"""
WAIT_SECONDS = 120.0
"""
What is not found after so long is missed.
"""
AFTERMATH_SECONDS = 5.0
"""
How long to look on after it was found: what else is said then must follow from the fault.
"""
CLEAR_SECONDS = 8.0
"""
No exporter is silent from so long before a fault: what cannot be read cannot be found, and that is another fault.
"""
SEEN_BEFORE_SECONDS = 3.0
"""
The engine is watched for as long before a fault, at least.
"""
TRIES = 400


@dataclass(slots=True)
class Injection:
    """
    A fault, and what came of it.
    """

    seed: int
    kind: FaultKind
    fault: Fault | None = None
    found_at: float | None = None
    """When the finding opened; None if it never did."""
    step: int | None = None
    """The step that was named."""
    right_step: bool = False
    right_ranks: bool = False
    wrong: list[str] = field(default_factory=list)
    """What was said that does not follow: `kind: sentence`."""
    diverged: bool = False
    """Whether ranks were said to have parted, or to be wedged."""
    _tapes: dict[RankId, Tape] = field(default_factory=dict)

    @property
    def delay(self) -> float | None:
        """Seconds from the evidence to the look that found it."""
        return None if self.found_at is None or self.fault is None else self.found_at - self.fault.at

    def run(self) -> "Injection":
        """
        Make the engine, put the fault in, watch.
        """
        random, counts = Random(self.seed), Counts()
        shape = changed(draw_shape(random), ring=4096, warm_up=False)
        shape = self.kind.suits(shape)
        exporters = make_exporters(shape, random, counts)
        engine = make_engine(
            f"f{self.seed}", shape, random.randint(*STEPS), random.uniform(0, 2), [one.clock_ns for one in exporters], random, counts
        )  # fmt: skip
        for tape in engine.tapes:
            exporters[tape.node].tapes.append(tape)
        ground = Ground(engine, exporters, random)
        for exporter in exporters:
            draw_troubles(exporter, engine.last_end)
        for _ in range(TRIES):
            self.fault = self.kind.put(ground, random.randint(FIRST_STEP, engine.steps - LAST_STEPS))
            if self.fault is not None:
                break
        else:
            return self  # no step of this engine suits the fault
        finish(ground)
        for exporter in exporters:
            clear_outages(exporter, self.fault.at - CLEAR_SECONDS)
        self._tapes = {tape.id: tape for tape in engine.tapes}
        since = random.uniform(0, max(0.0, self.fault.at - SEEN_BEFORE_SECONDS))
        Watch(exporters, random, counts, self._judge, since).run(self.fault.at + WAIT_SECONDS)
        self._tapes = {}  # too much to keep of each
        return self

    def _judge(self, look: Look) -> bool:
        fault = self.fault
        assert fault is not None
        for key, finding in look.after.findings.items():
            if key in look.before.findings:
                continue
            kind = finding.kind
            mine = kind is self.kind.kind and self.found_at is None and look.at >= fault.at
            if kind is FindingKind.BLIND and look.blind_due and (not mine or fault.variant != "exporter"):
                continue  # an exporter's silence, said as it must be
            self.diverged = self.diverged or kind in (*STICKY, FindingKind.WEDGED)
            if mine:
                self.found_at, self.step = look.at, finding.step
                step = fault.step
                if fault.followed:
                    step = min(self._tapes[rank].newest(look.at) for rank in finding.ranks)
                self.right_step = finding.step == step
            elif kind not in fault.follows and not (
                kind is self.kind.kind and look.at >= fault.at
            ):  # it may come and go
                self.wrong.append(f"{kind.value}: {finding.sentence}")
        if self.found_at is None:
            return False
        current = look.after.findings.get((self.kind.kind, -1 if self.kind.kind is FindingKind.BLIND else 0))
        if current is not None:
            named = set(current.ranks)
            if fault.exact:  # it may spread from rank to rank, and end on one before the others
                self.right_ranks = named <= fault.ranks and (self.right_ranks or named == fault.ranks)
            elif self.kind.kind in STICKY:  # it opens once a rank of each opinion has spoken
                self.right_ranks = bool(named & fault.ranks) and bool(named - fault.ranks)
            else:
                self.right_ranks = fault.ranks <= named
        return look.at >= self.found_at + AFTERMATH_SECONDS
