"""
The pipeline group over pipes: every exchange is a rendezvous, as a collective that blocks is.

So a guard disagreement wedges by itself. The last rank waits for ever for its broadcast to be taken; the others leave
the step, begin the next one, and wait for ever to hand their tensors on. A rank whose peer has ended waits for ever
too, as in a device's collective.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np

from rankscope_exporter.simulation.runner import Tokens

Wire = Connection


@dataclass(frozen=True, slots=True)
class PipeGroup:
    """
    The wires of one rank: from the rank before it, to the rank after it, and for the sampled tokens (those of the last
    rank lead to all others, theirs lead to the last).
    """

    before: Wire | None
    after: Wire | None
    sampled: Sequence[Wire]

    @property
    def is_last_rank(self) -> bool:
        """
        Whether no rank comes after this one.
        """
        return self.after is None

    def wires(self) -> list[Wire]:
        """
        All wires of this rank.
        """
        return [wire for wire in (self.before, self.after, *self.sampled) if wire is not None]

    def take_tensors(self) -> None:
        """
        Wait for what the rank before this one computed.

        """
        if self.before is not None:
            _take(self.before)

    def hand_tensors(self) -> None:
        """
        Hand what this rank computed to the next one, which must come for it.

        """
        if self.after is not None:
            _give([self.after], b"tensors")

    def broadcast(self, tokens: Tokens) -> None:
        """
        Give the sampled tokens to all other ranks, which must all come for them.

        """
        _give(self.sampled, tokens.tobytes())

    def receive(self, shape: tuple[int, int]) -> Tokens:
        """
        Take the sampled tokens from the last rank.

        """
        return np.frombuffer(_take(self.sampled[0]), np.int32).reshape(shape)


def _give(wires: Sequence[Wire], data: bytes) -> None:
    try:
        for wire in wires:
            wire.send_bytes(data)
        for wire in wires:
            wire.recv_bytes()
    except (EOFError, OSError):
        _hang()


def _take(wire: Wire) -> bytes:
    try:
        data = wire.recv_bytes()
        wire.send_bytes(b"taken")
    except (EOFError, OSError):
        _hang()
    return data


def _hang() -> NoReturn:
    while True:
        signal.pause()


def make_groups(size: int) -> list[PipeGroup]:
    """
    The groups of a pipeline of `size` ranks, wired with each other.
    """
    between = [Pipe() for _ in range(size - 1)]
    sampled = [Pipe() for _ in range(size - 1)]
    groups = []
    for rank in range(size):
        last = rank == size - 1
        groups.append(
            PipeGroup(
                before=between[rank - 1][1] if rank else None,
                after=None if last else between[rank][0],
                sampled=[pair[0] for pair in sampled] if last else [sampled[rank][1]],
            )
        )
    return groups
