"""
What was polled about an engine, gathered for judging: the input of findings, views and plans.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankscope_exporter.contract import (
    DeviceLengths,
    HookReport,
    HookState,
    MitigationState,
    Phase,
    RankIdentity,
    RankLife,
    RankReport,
    RequestTable,
    StepFailure,
)
from rankscope_server.domain.clock import Moment, NodeClock
from rankscope_server.domain.history import StepHistory
from rankscope_server.domain.model import RankId

IDLE_SECONDS = 3.0
"""
An engine without a step in flight is idle when its last step is older than this.
"""

REACH_SECONDS = 3.0
"""
An exporter that fails to answer, and whose last answer is older than this, is out of reach.
"""

SILENT_SECONDS = 8.0
"""
The same without a failure: a server that has no time to ask, on a machine that is overloaded, blames no exporter before.
"""

_DONE = int(Phase.DONE)  # members of an enumeration are slow to compare

OPTIONAL_HOOKS = frozenset({"_is_all_reqs_chunked_prefill", "PPHandler.broadcast_drafts", "pool"})
"""
What some releases of vLLM lack without anything being missed.
"""

STEP_HOOK = "execute_model"
"""
The hook that counts steps and hashes what is scheduled.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RankFacts:
    """
    One rank: what its exporter said last, and the steps that are held of it. Equal only to itself.
    """

    id: RankId
    label: str
    report: RankReport
    history: StepHistory
    clock: NodeClock
    exporter: str
    """URL of its exporter."""
    first_seen: float
    life_since: float
    """Monotonic second since which `report.life` holds, as far as the server saw."""
    requests: RequestTable | None = None
    reported: float = 0.0
    """Monotonic second at which `report` arrived."""

    @property
    def phase(self) -> Phase | None:
        """Phase of its newest step; None before the first."""
        head = self.history.head
        return None if head is None else Phase(head.phase)

    @property
    def failure(self) -> StepFailure | None:
        """
        The step that an error of vLLM ended, if the rank has begun none since: it will not go on.

        Step records come sooner than the report that says how it came about: `method` and `kind` are empty until then.
        """
        told, head = self.report.failure, self.history.head
        if told is not None and told.step >= self.history.last:
            return told
        if head is None or not head.failed or self.report.step > head.step:
            return None
        return StepFailure(step=head.step, phase=head.phase, method="", kind="")

    @property
    def in_flight(self) -> bool:
        """Whether its newest step is neither done nor ended by an error."""
        head = self.history.head
        return head is not None and head.phase < _DONE and self.failure is None

    def in_flight_seconds(self, now: Moment) -> float | None:
        """
        Age of the step in flight; None while none is.
        """
        head = self.history.head
        return self.clock.age_of(head.begin_ns, now) if head is not None and self.in_flight else None

    @property
    def quiet_seconds(self) -> float:
        """
        How long it had done nothing when its exporter last answered; infinite before its first step.

        Told by the node's clock alone: an exporter that is not reached makes no rank look frozen.
        """
        head = self.history.head
        if head is None:
            return math.inf
        return max(0.0, (self.clock.monotonic_ns - max(head.begin_ns, head.decide_ns, head.end_ns)) / 1e9)

    @property
    def answered(self) -> float:
        """Monotonic second at which its exporter last spoke of it."""
        return max(self.clock.received, self.reported)

    @property
    def active_until(self) -> float:
        """Monotonic second, of the server's clock, at which it last did something; minus infinity before its first step."""
        return self.clock.received - self.quiet_seconds

    @property
    def started(self) -> float:
        """Monotonic second, of the server's clock, at which its process began; minus infinity where its node's wall clock was set since."""
        age = self.clock.unix - self.report.started_unix
        return self.clock.received - age if age >= 0 else -math.inf

    @property
    def newest_step(self) -> int:
        """The newest step that it is known to have begun; 0 before the first."""
        return max(self.history.last, self.report.step)

    @property
    def running(self) -> bool:
        """Whether its process runs, as far as is known."""
        return self.report.life is RankLife.RUNNING

    @property
    def is_v2(self) -> bool:
        """Whether it runs the V2 model runner, whose request state lives on the device."""
        return self.report.identity.runner == "V2"

    @property
    def at_risk(self) -> bool:
        """Whether what is watched here can happen to it at all: it needs pipeline parallelism and speculative decoding."""
        return self.report.identity.pp_size > 1 and self.report.identity.spec_tokens > 0

    @property
    def seen_whole(self) -> bool:
        """Whether no hook of it is off and none has failed: its counts leave nothing out."""
        return not self.report.faults and not self.lost_hooks

    @property
    def steps_whole(self) -> bool:
        """Whether the hook that counts its steps has never failed."""
        return not any(hook.faults for hook in self.report.hooks if hook.hook == STEP_HOOK)

    @property
    def lost_hooks(self) -> tuple[HookReport, ...]:
        """
        Hooks that should be on and are not: their probe failed, they took themselves out, or what they would wrap is not
        there, though it is missed. With one pipeline rank there is no exchange, and nothing is missed of it.
        """
        return tuple(
            hook
            for hook in self.report.hooks
            if hook.state in (HookState.OFF, HookState.REMOVED)
            or (hook.state is HookState.ABSENT and hook.hook not in OPTIONAL_HOOKS and self.report.identity.pp_size > 1)
        )

    @property
    def device(self) -> DeviceLengths | None:
        """Its last sample of device-side lengths; None where none is taken."""
        return self.report.device

    def device_age_seconds(self, now: Moment) -> float | None:
        """
        Age of that sample; None where there is none, or where its age is not known.
        """
        if self.device is None or self.device.age_seconds is None:
            return None
        return self.device.age_seconds + max(0.0, now.monotonic - self.reported)

    @property
    def trim(self) -> MitigationState | None:
        """Where the trim fix stands on it; None if it says nothing about it."""
        for mitigation in self.report.mitigations:
            if mitigation.mitigation == "trim":
                return mitigation.state
        return None

    @property
    def trim_reason(self) -> str:
        """What the rank says about the state of the trim fix."""
        return next((m.reason for m in self.report.mitigations if m.mitigation == "trim"), "")


@dataclass(frozen=True, slots=True)
class ExporterFacts:
    """
    One exporter of a deployment.
    """

    url: str
    answered: float | None
    """Monotonic second of its last good answer; None if there never was one."""
    error: str
    """What is wrong with it now, with the remedy; empty while it answers."""
    control: bool | None
    """Whether it takes commands; None while that is not known."""
    token: bool
    """Whether the server has a token for it."""
    since: float
    """Monotonic second since which the server tries."""

    def age_seconds(self, now: Moment) -> float | None:
        """
        Age of its last good answer; None if there never was one.
        """
        return None if self.answered is None else max(0.0, now.monotonic - self.answered)

    def out_of_reach(self, now: Moment) -> bool:
        """
        Whether what it said is too old to be trusted.
        """
        silent = now.monotonic - (self.since if self.answered is None else self.answered)
        return silent > (REACH_SECONDS if self.error else SILENT_SECONDS)

    def reached(self, now: Moment) -> bool:
        """
        Whether it has answered, and not too long ago: what it does not speak of is not there.
        """
        return self.answered is not None and not self.out_of_reach(now)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """
    One engine: its ranks in order (dp, pp, tp), and the exporters that speak of them.
    """

    deployment: str
    engine: str
    ranks: tuple[RankFacts, ...]
    exporters: tuple[ExporterFacts, ...]
    replaced: bool = False
    """Whether a newer engine of the deployment has taken its place."""

    @property
    def identity(self) -> RankIdentity:
        """Of its first rank: model, version and sizes are the same on all."""
        return self.ranks[0].report.identity

    @property
    def groups(self) -> tuple[tuple[RankFacts, ...], ...]:
        """Its ranks by data-parallel rank: only ranks of one group take the same steps."""
        return tuple(tuple(group) for _, group in itertools.groupby(self.ranks, key=lambda rank: rank.id.dp_rank))

    @property
    def ended(self) -> bool:
        """Whether all its processes are gone."""
        return all(rank.report.life is RankLife.GONE for rank in self.ranks)

    @property
    def missing(self) -> int:
        """How many of its ranks no exporter has spoken of."""
        expected = sum(max(1, g[0].report.identity.pp_size) * max(1, g[0].report.identity.tp_size) for g in self.groups)
        return max(0, expected - len(self.ranks))

    @property
    def newest_step(self) -> int:
        """The newest step that a rank began; 0 before the first."""
        return max(rank.newest_step for rank in self.ranks)

    def data_age_seconds(self, now: Moment) -> float | None:
        """
        Age of what is known: that of the exporter that has been silent for longest.
        """
        ages = [exporter.age_seconds(now) for exporter in self.exporters]
        known = [age for age in ages if age is not None]
        return max(known) if known and len(known) == len(ages) else None

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do: no step in flight, none for a while."""
        return not any(rank.in_flight for rank in self.ranks) and all(
            r.quiet_seconds > IDLE_SECONDS for r in self.ranks
        )


def reach_of(group: Sequence[RankFacts]) -> int:
    """
    How many batches of an engine can be in flight, at least 1: a request comes round after as many steps.
    """
    return max(1, group[0].report.identity.pp_size)


def of_one_run(group: Sequence[RankFacts]) -> Sequence[RankFacts]:
    """
    The ranks of a group whose processes ran at the same time, which are all unless an engine is started anew under its old
    name. What is left of its last run is gone since before the newest process was seen, and did nothing after that began;
    neither is enough by itself, as wall clocks are set and servers are started late.
    """
    newest = max(group, key=lambda rank: rank.started)
    return [
        rank
        for rank in group
        if rank.report.life is not RankLife.GONE
        or rank.history.last == 0
        or rank.life_since > newest.first_seen
        or rank.active_until >= newest.started
    ]


def rank_labels(ids: Sequence[RankId]) -> tuple[str, ...]:
    """
    The shortest names that still tell ranks apart: `pp0`; with several of them `pp0 tp1`, `dp1 pp0`.
    """
    several_dp = len({rank.dp_rank for rank in ids}) > 1
    several_tp = len({rank.tp_rank for rank in ids}) > 1
    return tuple(
        " ".join(
            [
                *([f"dp{rank.dp_rank}"] if several_dp else []),
                f"pp{rank.pp_rank}",
                *([f"tp{rank.tp_rank}"] if several_tp else []),
            ]
        )
        for rank in ids
    )


def most_common(values: Iterable[str]) -> str:
    """
    What most say; empty if nobody says anything.
    """
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else ""


def joined(labels: Iterable[str]) -> str:
    """
    Names in a sentence: `pp0`, `pp0 and pp1`, `pp0, pp1 and pp2`.
    """
    names = list(labels)
    if len(names) > 6:
        return f"{', '.join(names[:5])} and {len(names) - 5} others"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


_VERB = re.compile(r"^(broadcast|mask|post|skip)s\b")


def in_one_voice(labels: Sequence[str], words: str) -> str:
    """
    Ranks that say the same, in a sentence: `pp0 masks 1 of 3 requests`, `pp0 and pp1 mask 1 of 3 requests`.
    """
    return f"{joined(labels)} {_VERB.sub(_of_many, words) if len(labels) > 1 else words}"


def _of_many(verb: re.Match[str]) -> str:
    return verb[1]


def plain_url(url: str) -> str:
    """
    An address without the name and password that may stand in it.
    """
    return re.sub(r"//[^@/]*@", "//", url)


def seconds(value: float) -> str:
    """
    A time span for people: `0.4 s`, `12 s`, `4 min`, `3 h`, `2 d`.
    """
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if value < 172800 else f"{value / 86400:.0f} d"
