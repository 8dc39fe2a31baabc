"""
A simulated rank: one process, which carries out the steps that its engine sends.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankscope_exporter import __version__
from rankscope_exporter.contract.http import RankIdentity
from rankscope_exporter.hooks.install import install
from rankscope_exporter.namespaces import read_pid_namespace
from rankscope_exporter.settings import WorkerSettings
from rankscope_exporter.simulation.group import PipeGroup, Wire
from rankscope_exporter.simulation.lifeline import die_with_parent, leave_signals_to_parent
from rankscope_exporter.simulation.runner import ModelRunner
from rankscope_exporter.simulation.spec import EngineSpec

FORWARD_SHARE = 0.25
"""
Part of a step's time that each rank computes for.
"""

RETENTION_SECONDS = 600.0
"""
How long the flight file of a rank that was ended stays.
"""


@dataclass(frozen=True, slots=True)
class Seat:
    """
    A rank's place in its engine: the wires of its group, the wire to the engine, and wires of others that it inherits.
    """

    engine: str
    pp_rank: int
    group: PipeGroup
    commands: Wire
    foreign: Sequence[Wire]


def run_rank(spec: EngineSpec, seat: Seat, parent: int) -> None:
    """
    Carry out steps until the engine closes its end of the wire.
    """
    die_with_parent(parent)
    leave_signals_to_parent()
    for wire in seat.foreign:  # or the one who reads at the other side would not see its end
        wire.close()
    runner = ModelRunner(
        seat.group,
        slots=spec.workload.slots,
        draft_tokens=spec.workload.draft_tokens,
        accept=spec.workload.accept,
        forward=_forward(spec),
    )
    identity = rank_identity(spec, seat.engine, seat.pp_rank, runner)
    installation = install(runner, identity, worker_settings(spec), completes=True)
    try:
        seat.commands.send(installation.flight is not None)
        _serve(runner, seat.group, seat.commands)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the engine has ended


def _serve(runner: ModelRunner, group: PipeGroup, commands: Wire) -> None:
    while True:
        plan = commands.recv()
        if not plan.total_num_scheduled_tokens:
            generated = runner.execute_model(plan)
        else:
            group.take_tensors()
            runner.execute_model(plan)
            group.hand_tensors()
            generated = runner.sample_tokens(None)
        if group.is_last_rank:
            commands.send(generated)


def _forward(spec: EngineSpec) -> Callable[[], None]:
    seconds = FORWARD_SHARE / spec.workload.steps_per_second if spec.paced else 0.0
    return lambda: time.sleep(seconds)


def worker_settings(spec: EngineSpec) -> WorkerSettings:
    """
    The settings that the hooks of a simulated rank are installed with.
    """
    return WorkerSettings(
        flight_dir=spec.flight_dir, trim_fix="on" if spec.fix else "off", retention_seconds=RETENTION_SECONDS
    )


def rank_identity(spec: EngineSpec, engine: str, pp_rank: int, runner: ModelRunner) -> RankIdentity:
    """
    Who the simulated rank says it is.
    """
    tokens = spec.workload.draft_tokens
    return RankIdentity(
        engine=engine,
        dp_rank=0,
        pp_rank=pp_rank,
        tp_rank=0,
        pp_size=spec.pp_size,
        tp_size=1,
        dp_size=1,
        global_rank=pp_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_namespace=read_pid_namespace(),
        model=f"simulated (k={tokens})",
        vllm_version="simulated",
        runner="V1",
        runner_class=f"{type(runner).__module__}.{type(runner).__qualname__}",
        device="simulated",
        async_scheduling=True,
        spec_method="simulated" if tokens else None,
        spec_tokens=tokens,
        exporter_version=__version__,
    )
