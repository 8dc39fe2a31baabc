"""
Whether a control command may be written, and the word it becomes.
"""

from collections.abc import Sequence

from rankscope_exporter.collectors.reading import RankReading, current, state_of
from rankscope_exporter.contract import ControlCommand, Mitigation, MitigationState, RankLife
from rankscope_exporter.flight.layout import encode_control

_CONTROLLABLE = (MitigationState.AVAILABLE, MitigationState.APPLIED)


def mitigation_named(name: str) -> Mitigation | None:
    """
    The mitigation of that name, as reports and commands write it; None if there is none.
    """
    return next((mitigation for mitigation in Mitigation if mitigation.name.lower() == name), None)


def command_word(command: ControlCommand, mitigation: Mitigation) -> int:
    """
    The command as the machine word that ranks read.
    """
    return encode_control(mitigation, command.generation, command.effective_step, desired=command.desired)


def ranks_of(readings: list[RankReading], engine: str) -> list[RankReading]:
    """
    The ranks of `engine` on this node, one reading each.
    """
    return [rank for rank in current(readings) if rank.identity.engine == engine]


def refusal(command: ControlCommand, mitigation: Mitigation, ranks: Sequence[RankReading]) -> str:
    """
    Why the command must not be written for these ranks; empty if it may be.

    The same command may come again: a client that got no answer repeats it.
    """
    if not ranks:
        return f"no rank of engine {command.engine!r} has a flight file on this node: GET /v1/ranks lists the engines"
    for rank in ranks:
        name = _name(rank)
        if rank.life is RankLife.UNKNOWN:
            return f"whether {name} runs is unknown: let this exporter share the process namespace of vLLM"
        if rank.life is not RankLife.RUNNING:
            return f"{name} is {rank.life.value}: all ranks must run, or they could not act at the same step"
        state = state_of(rank, mitigation)
        if state is None:
            return f"{name} does not report {command.mitigation!r}: see `rankscope-exporter doctor`"
        if state not in _CONTROLLABLE:
            reason = next((m.reason for m in rank.mitigations if m.mitigation == command.mitigation and m.reason), "")
            return f"{name} reports {command.mitigation!r} as {state.label}" + (f": {reason}" if reason else "")
        if command.generation < rank.control.requested_generation or (
            command.generation == rank.control.requested_generation and not _repeats(command, rank)
        ):
            return f"generation {command.generation} is not newer than {rank.control.requested_generation}, which {name} was asked for already"
    return ""


def _repeats(command: ControlCommand, rank: RankReading) -> bool:
    return (command.desired, command.effective_step) == (rank.control.desired, rank.control.effective_step)


def _name(rank: RankReading) -> str:
    identity = rank.identity
    return f"rank dp{identity.dp_rank} pp{identity.pp_rank} tp{identity.tp_rank}"
