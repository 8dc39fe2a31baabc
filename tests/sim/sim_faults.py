"""
Faults, put into healthy traffic at a random step: what each of them writes into the records, and what has to be said.

Every function changes the tapes of one engine, and answers with what is known of the fault; None where the step does not
suit it, so that another one is tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from sim_engine import MadeEngine
from sim_exporter import MadeExporter, go_silent
from sim_ranks import NEVER, SAMPLED_MESSAGES, Tape, Toggle, write_totals
from sim_shape import Shape, changed

from rankscope_exporter.contract import (
    ControlOutcome,
    Guard,
    HookReport,
    HookState,
    MitigationReport,
    MitigationState,
    Phase,
)
from rankscope_server.domain.model import FindingKind, RankId

MANY = 1 << 40
LEAST_DRIFT_SECONDS = 0.7
"""
Drift lasts for as long, at least: what is over again at the next look is not looked for.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """
    What was put in.
    """

    variant: str
    at: float
    """When the evidence was in the flight files: from then on it can be found."""
    step: int | None
    """The step that has to be named; None where there is none."""
    ranks: frozenset[RankId]
    """The ranks that it was put into."""
    exact: bool = False
    """Whether just these have to be named. Else others are, too: those that they differ from, or that end with them."""
    follows: frozenset[FindingKind] = frozenset()
    """Other kinds that follow from it and may be found too."""
    followed: bool = False
    """Whether the rest of the engine ends as well, so that more ranks are lost and an earlier step may be the first."""


@dataclass(slots=True)
class Ground:
    """
    What a fault is put into.
    """

    engine: MadeEngine
    exporters: list[MadeExporter]
    random: Random

    @property
    def tapes(self) -> list[Tape]:
        """The ranks."""
        return self.engine.tapes

    @property
    def shape(self) -> Shape:
        """What the engine is like."""
        return self.engine.shape

    def some(self, tapes: Sequence[Tape] | None = None) -> list[Tape]:
        """
        One rank or more, but not all of the engine.
        """
        tapes = self.tapes if tapes is None else tapes
        most = min(len(tapes), len(self.tapes) - 1)
        return self.random.sample(list(tapes), self.random.randint(1, most))

    def span(self, step: int) -> slice:
        """
        Rows of a fault that begins at a step and lasts: for that step only, for some, or to the end.
        """
        return slice(step - 1, step - 1 + self.random.choice((1, 1, self.random.randint(2, 12), MANY)))

    def rest(self, some: Sequence[Tape]) -> list[Tape]:
        """
        The other ranks.
        """
        return [tape for tape in self.tapes if tape not in some]


def ids(tapes: Sequence[Tape]) -> frozenset[RankId]:
    """
    Who they are.
    """
    return frozenset(tape.id for tape in tapes)


def second_word(part: str, some: Sequence[Tape], rest: Sequence[Tape], step: int) -> float:
    """
    When ranks of both opinions have written a part of a step.
    """
    return max(min(float(getattr(tape, part)[step - 1]) for tape in tapes) for tapes in (some, rest))


def put_drift(ground: Ground, step: int) -> Fault | None:
    """
    Ranks count more than the scheduler from a step on, in every step or in those of one batch in flight.
    """
    shape, random = ground.shape, ground.random
    some = ground.random.sample(ground.tapes, random.randint(1, len(ground.tapes)))
    every = random.choice((1, shape.pp_size))
    rows = np.arange(step - 1, ground.engine.steps, every)
    before = slice(max(0, step - 2 * shape.pp_size - 3), step - 1)
    cached = some[0].records["cached"]
    while_drifting = rows[some[0].begin[rows] < some[0].begin[step - 1] + LEAST_DRIFT_SECONDS]
    if (
        len(while_drifting) < 2
        or not cached[while_drifting].all()
        or any((tape.records["drift_max"][before] > 0).any() for tape in some)
    ):
        return None
    rows = rows[cached[rows] > 0]
    growth = random.choice((0, 1, shape.spec_tokens))
    for tape in some:
        records = tape.records
        drift = random.randint(1, 5) + growth * np.arange(len(rows))
        for name, values in (("drift_max", drift), ("drifting", np.ones_like(drift)), ("drift_sum", drift)):
            records[name][rows] = values
        records["state_sum"][rows] = (records["scheduler_sum"][rows].astype(np.int64) + drift).astype(np.uint64)
        records["state_max"][rows] = records["scheduler_max"][rows] + drift
    at = min(float(tape.state[rows[1]]) for tape in some)
    return Fault("every step" if every == 1 else "one batch", at, step, ids(some), exact=True)


def put_mask(ground: Ground, step: int) -> Fault | None:
    """
    Ranks mask one request more than others, or one less, and still decide alike.
    """
    records, some, rows = ground.tapes[0].records, ground.some(), ground.span(step)
    suits = (records["requests"][rows] >= 3) & (records["masked"][rows] + 1 < records["requests"][rows])
    if not suits[0]:
        return None
    fewer = bool(records["masked"][step - 1]) and ground.random.random() < 0.5
    for tape in some:
        part = tape.records[rows]  # a view
        part["masked"][suits] = np.where(
            fewer, np.maximum(part["masked"], 1).astype(np.int64) - 1, part["masked"].astype(np.int64) + 1
        )[suits]
        part["mask_hash"][suits] ^= np.uint64(0x5DEECE66D)
        part["mask_hash"][part["masked"] == 0] = 0
    at = second_word("decide", some, ground.rest(some), step)
    return Fault("one less" if fewer else "one more", at, step, ids(some))


def flip_guard(ground: Ground, some: Sequence[Tape], rows: slice) -> None:
    """
    Ranks decide the other way: those that would broadcast mask everything and skip, those that would skip mask nothing.
    """
    for tape in some:
        part = tape.records[rows]
        skips, sends = part["guard"] == Guard.SKIP, part["guard"] == Guard.BROADCAST
        part["guard"][skips], part["guard"][sends] = Guard.BROADCAST, Guard.SKIP
        if ground.shape.masked:
            part["masked"][skips], part["mask_hash"][skips] = 0, 0
            part["masked"][sends] = part["requests"][sends]
            part["mask_hash"][sends] ^= np.uint64(0x5DEECE66D)
        part["width"][sends], part["posted"][sends] = 0, 0
        part["width"][skips] = ground.shape.spec_tokens + 1 if ground.shape.is_v2 else 1
        part["posted"][skips] = SAMPLED_MESSAGES if ground.shape.is_v2 else 1


def put_guard(ground: Ground, step: int) -> Fault | None:
    """
    Ranks decide otherwise than others about the collective of a step; that nothing hangs is luck.
    """
    record = ground.tapes[0].records[step - 1]
    if not record["requests"] or record["masked"] not in (0, record["requests"]):
        return None
    some = ground.some()
    flip_guard(ground, some, slice(step - 1, step))
    at = second_word("decide", some, ground.rest(some), step)
    kind = "skips" if record["guard"] == Guard.BROADCAST else "sends"
    return Fault(kind, at, step, ids(some), follows=frozenset({FindingKind.MASK_DISAGREEMENT}))


def put_width(ground: Ground, step: int) -> Fault | None:
    """
    Ranks post another number of columns, or of collectives.
    """
    some, rows = ground.some(), ground.span(step)
    if ground.tapes[0].records["guard"][step - 1] != Guard.BROADCAST:
        return None
    columns = ground.random.random() < 0.5
    more = ground.random.random() < 0.5
    for tape in some:
        part = tape.records[rows]
        sends = part["guard"] == Guard.BROADCAST
        if columns:
            part["width"][sends] = part["width"][sends] + 1 if more or not ground.shape.spec_tokens else 1
        else:
            part["posted"][sends] = part["posted"][sends] + 1 if more else part["posted"][sends] - 1
    at = second_word("decide" if columns else "end", some, ground.rest(some), step)
    return Fault("columns" if columns else "collectives", at, step, ids(some))


def put_batch(ground: Ground, step: int) -> Fault | None:
    """
    Ranks are given another batch; the hash differs from there on, as it rolls.
    """
    some = ground.some()
    for tape in some:
        tape.records["batch_hash"][step - 1 :] ^= np.uint64(0x5DEECE66D)
        tape.records["scheduled_tokens"][step - 1] += ground.random.choice((0, 1))
    return Fault("", second_word("begin", some, ground.rest(some), step), step, ids(some))


def hang(tape: Tape, step: int, phase: Phase) -> None:
    """
    A rank never leaves a phase of a step.
    """
    row = step - 1
    if phase is Phase.DECIDED and tape.decide[row] == NEVER:
        phase = Phase.STATE_UPDATED
    for name, least in (("state", Phase.STATE_UPDATED), ("decide", Phase.DECIDED), ("end", Phase.DONE)):
        getattr(tape, name)[row if phase < least else row + 1 :] = NEVER
    tape.begin[row + 1 :] = NEVER


def last_motion(tapes: Sequence[Tape]) -> float:
    """
    When the last of the ranks did its last thing.
    """
    return max(
        float(times[times < NEVER].max())
        for tape in tapes
        for times in (tape.begin, tape.state, tape.decide, tape.end)
        if (times < NEVER).any()
    )


def stuck_step(tapes: Sequence[Tape]) -> int:
    """
    The earliest step that is in flight for good.
    """
    newest = [(tape.newest(1e12), tape) for tape in tapes]
    return min(step for step, tape in newest if tape.end[step - 1] == NEVER)


def put_wedge(ground: Ground, step: int) -> Fault | None:
    """
    A guard disagreement, after which nothing moves: receivers skip and the sender waits for them, or the other way.

    Where a collective blocks, those that posted it hang in it, and those that skipped come one step further at least. On
    a device it is only enqueued: all go on for some steps, and stand still somewhere else.
    """
    shape, random = ground.shape, ground.random
    ahead = slice(step - 1, step + shape.depth + 1)
    records = ground.tapes[0].records
    if (
        ground.engine.gaps[step : step + shape.depth].any()
        or not records["requests"][ahead].all()
        or records["guard"][step - 1] != Guard.BROADCAST
    ):
        return None
    senders = [tape for tape in ground.tapes if tape.id.pp_rank == shape.pp_size - 1]
    receivers = ground.rest(senders)
    sender_skips = random.random() < 0.5
    some = senders if sender_skips else ground.some(receivers)
    flip_guard(ground, some, slice(step - 1, step))
    at = second_word("decide", some, ground.rest(some), step)
    for tape in ground.tapes:
        if shape.blocking and tape not in some:
            hang(tape, step, Phase.DECIDED)
        elif tape in senders:
            # It has nothing to work on in the next step as soon as an earlier stage hangs.
            hang(tape, step + 1, Phase.STATE_UPDATED)
        else:
            hang(tape, step + random.randint(1, shape.depth - 1), random.choice((Phase.STATE_UPDATED, Phase.DECIDED)))
    at = max(at, last_motion(ground.tapes))
    follows = {FindingKind.GUARD_DISAGREEMENT, FindingKind.MASK_DISAGREEMENT}
    stuck = [tape for tape in ground.tapes if tape.end[tape.newest(1e12) - 1] == NEVER]
    name = f"{'sender' if sender_skips else 'receiver'} skips, {'in the call' if shape.blocking else 'enqueued'}"
    return Fault(name, at, stuck_step(ground.tapes), ids(stuck), exact=True, follows=frozenset(follows))


def put_stall(ground: Ground, step: int) -> Fault | None:
    """
    All ranks stand still without having parted: each where it is, or all in the same phase of the same step.
    """
    equal = ground.random.random() < 0.5
    if equal:
        phase = ground.random.choice((Phase.SCHEDULED, Phase.STATE_UPDATED, Phase.DECIDED))
        for tape in ground.tapes:
            hang(tape, step, phase)
    else:
        tape = ground.random.choice(ground.tapes)
        at = ground.random.uniform(float(tape.begin[step - 1]), float(tape.end[step - 1]))
        for tape in ground.tapes:
            tape.freeze(at)
    stuck = [tape for tape in ground.tapes if tape.end[tape.newest(1e12) - 1] == NEVER]
    return Fault(
        "equal" if equal else "as they were",
        last_motion(ground.tapes),
        stuck_step(ground.tapes),
        ids(stuck),
        exact=True,
    )


def put_loss(ground: Ground, step: int) -> Fault | None:
    """
    A rank's process ends, is stopped, or fails in a step; its peers wait for it, each as far as it comes.

    As a rule vLLM sees that a worker has died, and ends the others some seconds later or at once.
    """
    shape, random = ground.shape, ground.random
    lost = random.choice(ground.tapes)
    stage = [tape for tape in ground.tapes if tape.id.pp_rank == lost.id.pp_rank]
    row = step - 1
    latest = min(min(float(tape.decide[row]), float(tape.end[row])) for tape in stage)
    if lost.begin[row] >= latest or ground.engine.gaps[step : step + shape.depth].any():
        return None
    at = random.uniform(float(lost.begin[row]), latest)
    how = random.choice(("gone", "stopped", "failed"))
    lost.freeze(at)
    for tape in ground.rest([lost]):
        if tape.id.pp_rank >= lost.id.pp_rank:
            hang(tape, step, Phase.STATE_UPDATED)
        elif shape.blocking:
            hang(tape, step, Phase.DECIDED)
        else:
            hang(tape, step + random.randint(0, shape.depth - 1), Phase.STATE_UPDATED)
    followed = how != "stopped" and random.random() < 0.6
    if how == "gone":
        lost.gone = at
    elif how == "stopped":
        lost.stops.append((at, NEVER))
    else:
        lost.failed_at = at
    if followed:
        for tape in ground.tapes:
            tape.gone = min(tape.gone, at + random.uniform(0.1, 8.0))
    variant = f"{how}{', then all' if followed else ''}"
    return Fault(variant, at, step, ids([lost]), exact=not followed, followed=followed)


def put_mixed(ground: Ground, step: int) -> Fault | None:
    """
    The trim fix is turned on, and some ranks cannot act.
    """
    random = ground.random
    some = ground.some()
    put = min(float(tape.begin[step - 16]) for tape in ground.tapes)
    for tape in ground.tapes:
        fails = tape in some
        outcome = random.choice((ControlOutcome.REFUSED, ControlOutcome.FAILED)) if fails else ControlOutcome.APPLIED
        before = MitigationState.AVAILABLE
        after = before if fails else MitigationState.APPLIED
        tape.toggles.append(Toggle(put, 1, True, step, step, outcome, before, after))
        tape.records["generation"][step - 1 :] = 1
        tape.records["mitigation"][step - 1 :] = after
    at = second_word("state", some, ground.rest(some), step)
    return Fault("", at, step, ids(ground.tapes), exact=True)


def put_blind(ground: Ground, step: int) -> Fault | None:
    """
    An exporter goes away, a hook takes itself out, or the code is one that is not known.
    """
    random = ground.random
    variant = random.choice(("exporter", "hook", "code"))
    some = ground.some()
    at = min(float(tape.begin[step - 1]) for tape in some)
    if variant == "exporter":
        exporter = random.choice(ground.exporters)
        go_silent(exporter, at, hangs=random.random() < 0.5)
        some = [tape for tape in ground.tapes if tape.node == exporter.node]
    elif variant == "hook":
        for tape in some:
            hook = HookReport(hook="_update_states", state=HookState.REMOVED, reason="failed 10 times")
            tape.hooks_later = (at, [*tape.report.hooks, hook])
            row = tape.newest(at)
            for name in (
                "lengths", "drift_sum", "drift_max", "drifting", "state_sum", "state_max", "scheduler_sum", "scheduler_max",
            ):  # fmt: skip
                tape.records[name][row:] = 0
    else:
        for tape in some:
            told = MitigationReport(mitigation="trim", state=MitigationState.UNKNOWN_CODE, reason="bytecode differs")
            tape.report = tape.report.model_copy(update={"mitigations": [told]})
            tape.records["mitigation"] = MitigationState.UNKNOWN_CODE
        at = min(tape.born for tape in some)
    return Fault(variant, at, None, ids(some))


@dataclass(frozen=True, slots=True)
class FaultKind:
    """
    A kind of fault: how it is put in, and into which engines.
    """

    kind: FindingKind
    put: Callable[[Ground, int], Fault | None]
    suits: Callable[[Shape], Shape]
    """The same engine, so changed that the fault can happen to it."""

    @property
    def name(self) -> str:
        """For figures."""
        return self.kind.value.replace(" ", "_")


def _any(shape: Shape) -> Shape:
    return shape


def _v1(shape: Shape) -> Shape:
    mitigation = MitigationState.AVAILABLE if shape.mitigation is MitigationState.NOT_APPLICABLE else shape.mitigation
    return changed(shape, runner="V1", mitigation=mitigation, guarded=True, masked=True, device_samples=False)


def _masked(shape: Shape) -> Shape:
    return changed(shape, guarded=True, masked=True, slots=max(4, shape.slots))


def _guarded(shape: Shape) -> Shape:
    return changed(shape, guarded=True)


def _v2(shape: Shape) -> Shape:
    return changed(shape, runner="V2", mitigation=MitigationState.NOT_APPLICABLE)


def _toggled(shape: Shape) -> Shape:
    return changed(_v1(shape), mitigation=MitigationState.AVAILABLE, spec_tokens=0)


def _unseen(shape: Shape) -> Shape:
    return changed(
        _v1(shape),
        mitigation=MitigationState.AVAILABLE,
        spec_tokens=max(1, shape.spec_tokens),
        asynchronous=False,
        late_stage=False,
    )


KINDS = (
    FaultKind(FindingKind.DRIFT, put_drift, _v1),
    FaultKind(FindingKind.MASK_DISAGREEMENT, put_mask, _masked),
    FaultKind(FindingKind.GUARD_DISAGREEMENT, put_guard, _guarded),
    FaultKind(FindingKind.WIDTH_MISMATCH, put_width, _v2),
    FaultKind(FindingKind.BATCH_MISMATCH, put_batch, _any),
    FaultKind(FindingKind.WEDGED, put_wedge, _guarded),
    FaultKind(FindingKind.STALLED, put_stall, _any),
    FaultKind(FindingKind.RANK_LOST, put_loss, _any),
    FaultKind(FindingKind.MITIGATION_MIXED, put_mixed, _toggled),
    FaultKind(FindingKind.BLIND, put_blind, _unseen),
)


def finish(ground: Ground) -> None:
    """
    Bring what follows from changed records up to them.
    """
    for tape in ground.tapes:
        write_totals(tape)
