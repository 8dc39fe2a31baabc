"""
One made engine: its ranks' tapes, from their first file to the end of their processes.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from made_ranks import START_UNIX, made_device, made_report, made_v2_report
from sim_oddities import Counts, Oddity
from sim_ranks import (
    Pauses,
    Tape,
    draw_pauses,
    draw_transients,
    run_clockwork,
    sampled_stops,
    write_records,
    write_totals,
)
from sim_shape import Shape
from sim_steps import Scheduler

from rankscope_server.domain.model import RankId


@dataclass(slots=True)
class MadeEngine:
    """
    An engine, and when its processes came up.
    """

    name: str
    shape: Shape
    tapes: list[Tape]
    steps: int
    born: float
    """When the first flight file was made."""
    gaps: npt.NDArray[np.float64]
    """Seconds without anything to do before each step."""

    @property
    def last_end(self) -> float:
        """When the last step left the last rank, if all do."""
        return max(float(tape.end[-1]) for tape in self.tapes)

    def shut_down(self, at: float, random: Random) -> float:
        """
        End the processes one after the other, in good order; when the last one is gone.
        """
        order = list(self.tapes)
        random.shuffle(order)
        spread = random.uniform(0.1, 3.0)
        for number, tape in enumerate(order):
            tape.gone = at + spread * (number + random.random()) / len(order)
        return max(tape.gone for tape in order)


def make_engine(
    name: str, shape: Shape, steps: int, born: float, clocks_ns: list[int], random: Random, counts: Counts
) -> MadeEngine:
    """
    An engine that takes so many steps; `clocks_ns` is what the clock of each node says at second 0.
    """
    noise = np.random.default_rng(random.getrandbits(64))
    batches = Scheduler(shape, random, counts).run(steps)
    pauses: Pauses = draw_pauses(shape, steps, random, counts)
    births = [born + random.uniform(0, 0.3) for _ in shape.places]
    if shape.late_stage:
        late = random.choice(shape.places)[0]
        births = [
            at + (random.uniform(1, 15) if pp == late else 0) for at, (pp, _) in zip(births, shape.places, strict=True)
        ]
        counts[Oddity.LATE_JOIN] += shape.tp_size
    clockwork = run_clockwork(shape, batches, max(births) + random.uniform(0.5, 8), pauses, noise)
    transients = draw_transients(shape, steps, random)
    counts[Oddity.SYNC] += not shape.asynchronous
    tapes: list[Tape] = []
    for rank, (pp, tp) in enumerate(shape.places):
        node = shape.node_of(pp)
        records = write_records(shape, batches, clockwork, rank, clocks_ns[node], transients)
        counts[Oddity.TRANSIENT] += int((records["drift_max"] > 0).sum())
        counts[Oddity.QUEUE_FILLING] += int((records["queue_filled"] < records["queue_depth"]).sum())
        tape = Tape(
            f"{name}-pp{pp}-tp{tp}", RankId(0, pp, tp), node, _report(name, shape, rank, births[rank]), shape, records,
            clockwork.begin[rank], clockwork.state[rank], clockwork.decide[rank], clockwork.end[rank], births[rank],
        )  # fmt: skip
        write_totals(tape)
        sampled_stops(tape, pauses, rank)
        tapes.append(tape)
    return MadeEngine(name, shape, tapes, steps, born, batches.gap)


def _report(name: str, shape: Shape, rank: int, born: float) -> Any:
    pp, tp = shape.places[rank]
    common: dict[str, Any] = {
        "engine": name, "tp_rank": tp, "pp_size": shape.pp_size, "tp_size": shape.tp_size, "global_rank": rank, "pid": 4000 + rank,
        "host": f"node-{shape.node_of(pp)}", "spec_tokens": shape.spec_tokens, "async_scheduling": shape.asynchronous,
        "completes": shape.blocking, "started_unix": START_UNIX + born, "key": f"{name}-pp{pp}-tp{tp}", "trim": shape.mitigation,
        "spec_method": "eagle3" if shape.spec_tokens else None,
    }  # fmt: skip
    if shape.is_v2:
        return made_v2_report(pp, **common, device=made_device(0) if shape.device_samples else None)
    return made_report(pp, **common)
