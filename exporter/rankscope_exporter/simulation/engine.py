"""
A simulated engine: one process with the scheduler and its traffic, and a child process for each rank.
"""

import enum
import logging
import multiprocessing
import os
import secrets
import signal
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from rankscope_exporter.simulation.group import make_groups
from rankscope_exporter.simulation.lifeline import die_with_parent, leave_signals_to_parent
from rankscope_exporter.simulation.rank import Seat, run_rank
from rankscope_exporter.simulation.scheduler import Scheduler, SchedulerOutput
from rankscope_exporter.simulation.spec import EngineSpec
from rankscope_exporter.simulation.traffic import Traffic

logger = logging.getLogger("rankscope.simulation")

IN_FLIGHT = 2
"""
Steps that the scheduler has sent and not heard of, at most: it plans one ahead.
"""

STUCK_SECONDS = 3.0
"""
A step that takes longer is said to be stuck.
"""

BOOT_SECONDS = 2.0
"""
What a restarted engine takes to come up before it serves, so that its fix can be put back before the first step.
"""

_FORK = multiprocessing.get_context("fork")  # what the parent has imported is there already: a rank starts at once


class End(enum.Enum):
    """
    Why an engine came to its end.
    """

    WEDGED = "no rank came back from its step"
    RANK_LOST = "a rank's process is gone"


@dataclass(frozen=True, slots=True)
class Ranks:
    """
    The rank processes of a running engine and the engine's wires to them, in order of rank.
    """

    processes: list[ForkProcess]
    wires: list[Connection]

    def send(self, plan: SchedulerOutput) -> None:
        """
        Tell every rank about a step.

        Raises:
            OSError: a rank is gone.

        """
        for wire in self.wires:
            wire.send(plan)

    def result(self, seconds: float | None) -> dict[str, int] | None:
        """
        The result of the oldest step in flight, from the last rank; None if it takes longer than `seconds`.

        Raises:
            EOFError: a rank is gone.

        """
        ready = wait(self.wires, seconds)
        if not ready:
            return None
        if ready != [self.wires[-1]]:
            raise EOFError  # the other ranks say nothing: what there is to be read from them is their end
        generated: dict[str, int] = self.wires[-1].recv()
        return generated

    def kill(self) -> None:
        """
        End the rank processes, also those that hang in a collective.
        """
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for wire in self.wires:
            wire.close()


def run_engine(spec: EngineSpec, parent_wire: Connection, parent: int) -> None:
    """
    Serve simulated traffic until this process is ended. `parent_wire` is told once whether all ranks could be hooked.
    """
    die_with_parent(parent)
    leave_signals_to_parent()
    ranks, hooked = start_ranks(spec)
    parent_wire.send(hooked)
    while hooked:
        end = Driver(spec, ranks).run()
        if spec.restart_after is None:
            signal.pause()  # what is left of the engine stays to be looked at
        if end is End.RANK_LOST:
            time.sleep(spec.restart_after or 0.0)
        ranks.kill()
        ranks, hooked = start_ranks(spec)
        time.sleep(BOOT_SECONDS)
    ranks.kill()


def start_ranks(spec: EngineSpec) -> tuple[Ranks, bool]:
    """
    The ranks of a new engine, and whether all of them could be hooked.
    """
    engine = f"{spec.name}-{secrets.token_hex(3)}"  # like vLLM's instance id, another one at every start
    groups = make_groups(spec.pp_size)
    pairs = [_FORK.Pipe() for _ in groups]
    everything = [wire for group in groups for wire in group.wires()] + [wire for pair in pairs for wire in pair]
    ranks = Ranks([], [ours for ours, _ in pairs])
    for pp_rank, (group, (_, theirs)) in enumerate(zip(groups, pairs, strict=True)):
        own = {id(wire) for wire in (*group.wires(), theirs)}
        foreign = [wire for wire in everything if id(wire) not in own]
        process = _FORK.Process(
            target=run_rank, args=(spec, Seat(engine, pp_rank, group, theirs, foreign), os.getpid())
        )
        process.start()
        ranks.processes.append(process)
    for wire in everything:
        if wire not in ranks.wires:
            wire.close()
    try:
        hooked = all(wire.recv() for wire in ranks.wires)
    except EOFError:
        hooked = False
    logger.info("%s: engine %s is up", spec.name, engine)
    return ranks, hooked


class Driver:
    """
    Makes the ranks of one engine take steps.
    """

    def __init__(self, spec: EngineSpec, ranks: Ranks) -> None:
        self._spec = spec
        self._ranks = ranks
        self._scheduler = Scheduler(spec.workload.slots, spec.workload.draft_tokens)
        self._traffic = Traffic(spec.workload)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._steps = 0

    def run(self) -> End:
        """
        Take steps until there is no way on, and tell why.
        """
        try:
            while self._tick():
                pass
            end = End.WEDGED
        except (EOFError, OSError):
            end = End.RANK_LOST
        self._tell(end.value)
        return end

    def _tick(self) -> bool:
        began = time.monotonic()
        self._scheduler.add(self._traffic.tick())
        plan = self._scheduler.schedule()
        if plan is not None:
            self._ranks.send(plan)
            self._in_flight.append(plan)
            self._steps += 1
        while len(self._in_flight) >= IN_FLIGHT or (plan is None and self._in_flight):
            if not self._hear():
                return False
        if self._spec.paced:
            rest = began + 1 / self._spec.workload.steps_per_second - time.monotonic()
            time.sleep(max(rest, 0.0))
        return True

    def _hear(self) -> bool:
        """
        Take in the oldest step's result; False if it does not come before the engine is to be restarted.
        """
        limit = self._spec.restart_after
        first = STUCK_SECONDS if limit is None else min(STUCK_SECONDS, limit)
        generated = self._ranks.result(first)
        if generated is None:
            self._tell(f"stuck for {first:g} s")
            generated = self._ranks.result(None if limit is None else limit - first)
            if generated is None:
                return False
            self._tell("goes on")
        self._scheduler.update(self._in_flight.popleft(), generated)
        return True

    def _tell(self, what: str) -> None:
        logger.info("%s: %s; %d steps, %d requests done", self._spec.name, what, self._steps, self._scheduler.completed)
