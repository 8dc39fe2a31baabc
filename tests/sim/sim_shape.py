"""
What a made engine is like: its runner, its ranks and where they run, how fast it goes. Drawn at random, by a seed.
"""

import dataclasses
from dataclasses import dataclass
from random import Random

from rankscope_exporter.contract import MitigationState


@dataclass(frozen=True, slots=True)
class Shape:
    """
    One engine.
    """

    runner: str
    """`V1` or `V2`."""
    pp_size: int
    tp_size: int
    nodes: int
    """Nodes that its ranks are spread over, with an exporter each: whole pipeline stages."""
    steps_per_second: float
    spec_tokens: int
    """Draft tokens per request and step; 0 without speculation."""
    asynchronous: bool
    """Whether steps are scheduled ahead. Without it, ranks count tokens later than the scheduler: drift below zero."""
    blocking: bool
    """Whether a collective returns when it has completed (gloo), not when it is enqueued."""
    guarded: bool
    """Whether its release asks whether there is anything to send; earlier ones always send."""
    masked: bool
    """Whether it can be told which requests are masked."""
    mitigation: MitigationState
    slots: int
    """Requests that a batch holds at most."""
    depth: int
    """Steps that the scheduler has sent and not heard of, at most: so far are ranks apart."""
    ring: int
    """Steps that a flight file holds."""
    device_samples: bool
    """Whether lengths on the device are sampled (V2)."""
    late_stage: bool
    """Whether a node's part of the pipeline comes up seconds after the other."""
    warm_up: bool
    """Whether its first steps compile, for tens of seconds."""

    @property
    def is_v2(self) -> bool:
        """Whether its request state lives on the device."""
        return self.runner == "V2"

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Pipeline and tensor rank of each rank, in order."""
        return tuple((pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size))

    def node_of(self, pp_rank: int) -> int:
        """
        The node of a pipeline stage.
        """
        return pp_rank * self.nodes // self.pp_size


def draw_shape(random: Random) -> Shape:
    """
    Any engine.
    """
    v2 = random.random() < 0.35
    pp_size = random.choice((2, 2, 2, 3, 4, 4, 6, 8))
    tp_size = 2 if pp_size <= 4 and random.random() < 0.15 else 1
    spec_tokens = random.choice((0, 1, 3, 5))
    asynchronous = random.random() < 0.8
    plain = random.random() < 0.2  # a release without a guard, or a mask that cannot be read
    guarded = not plain or (not v2 and random.random() < 0.5)
    if v2:
        mitigation = MitigationState.NOT_APPLICABLE
    elif spec_tokens and asynchronous:  # with the fault in the code and no fix on, it would not be healthy
        mitigation = random.choice((MitigationState.APPLIED, MitigationState.NOT_APPLICABLE))
    else:
        mitigation = random.choice((MitigationState.APPLIED, MitigationState.AVAILABLE, MitigationState.AVAILABLE))
    return Shape(
        runner="V2" if v2 else "V1",
        pp_size=pp_size,
        tp_size=tp_size,
        nodes=random.choice((1, 2)),
        steps_per_second=20.0 * 10 ** random.random(),
        spec_tokens=spec_tokens,
        asynchronous=asynchronous,
        blocking=random.random() < 0.3,
        guarded=guarded,
        masked=not plain or (not guarded and not v2),
        mitigation=mitigation,
        slots=random.choice((1, 2, 4, 8, 16)),
        depth=pp_size + (1 if asynchronous else 0),
        ring=random.choice((128, 256, 1024, 4096)),
        device_samples=v2 and random.random() < 0.3,
        late_stage=random.random() < 0.4,
        warm_up=random.random() < 0.3,
    )


def changed(shape: Shape, **values: object) -> Shape:
    """
    The same engine, but for these values.
    """
    return dataclasses.replace(shape, **values)  # type: ignore[arg-type]
