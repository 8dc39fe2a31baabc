"""
Ranks that take no further step while their peers wait: gone, stopped, or with a step that an error of vLLM ended.
"""

from collections.abc import Iterator, Sequence

from rankscope_exporter.contract import RankLife
from rankscope_server.domain.assessed import Assessed, values_of
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, RankFacts, joined
from rankscope_server.domain.model import Evidence, FindingKind, Severity
from rankscope_server.domain.words import failed_in

SETTLE_SECONDS = 2.5
"""
How long a rank must be seen to be stopped before it counts: debuggers stop a process for a moment.
"""

SHUTDOWN_SECONDS = 10.0
"""
Processes of an engine that idles may end one after the other within this long: then it is shut down, and nothing is lost.
"""


def assess_life(engine: EngineFacts, group: Sequence[RankFacts], now: Moment) -> Iterator[Assessed]:
    """
    Whether ranks of a group are lost to the others.
    """
    if engine.replaced:
        return
    gone = [rank for rank in group if rank.report.life is RankLife.GONE]
    stopped = [rank for rank in group if rank.report.life is RankLife.STOPPED]
    failed = [rank for rank in group if rank.failure is not None]
    if not (gone or stopped or failed):
        return
    lifeless = [
        *(rank for rank in gone if _missed(rank, group)),
        *(rank for rank in stopped if rank.answered - rank.life_since >= SETTLE_SECONDS),
    ]
    lost = list(dict.fromkeys((*failed, *lifeless)))  # whose step failed first: that is the cause
    if not lost:
        return
    if len(gone) == len(group):
        failures = "".join(f"{rank.label} {_loss(rank)}; " for rank in failed)
        sentence = f"{failures}every process of the engine is gone; the last step was {max(rank.newest_step for rank in group)}: start vLLM again"
    else:
        sentence = f"{joined(f'{rank.label} {_loss(rank)}' for rank in lost)}{_waiting(group, lost)}"
    since = min(
        [now.unix_of(rank.life_since) for rank in lifeless if rank not in failed]
        + [_failed_unix(rank, now) for rank in failed]
    )
    step = min(filter(None, map(_last_step, lost)), default=None)
    evidence = Evidence(values_of(lost, map(_loss, lost)))
    yield Assessed(
        FindingKind.RANK_LOST, group[0].id.dp_rank, Severity.CRITICAL, sentence, step, tuple(lost), since, evidence
    )


def _missed(rank: RankFacts, group: Sequence[RankFacts]) -> bool:
    """
    Whether a process that is gone leaves something undone: it or another one ended within a step, or others are known to be
    in one since, or go on without it for longer than a shutdown takes. Records that came before prove nothing.
    """
    for one in group:
        ended = one.report.life is RankLife.GONE
        if one.in_flight and one.clock.received >= (one if ended else rank).life_since:
            return True
        if not ended and one.answered - rank.life_since >= SHUTDOWN_SECONDS:
            return True
    return False


def _last_step(rank: RankFacts) -> int:
    return rank.newest_step if rank.failure is None else rank.failure.step


def _loss(rank: RankFacts) -> str:
    gone = rank.report.life is RankLife.GONE
    how = "is gone" if gone else "is stopped by a signal"
    if rank.failure is not None:
        ended = f", and {how} (pid {rank.report.identity.pid})" if gone else ""
        return f"{failed_in(rank.failure)}{ended}"
    return f"{how} (pid {rank.report.identity.pid}) at step {rank.newest_step}"


def _waiting(group: Sequence[RankFacts], lost: Sequence[RankFacts]) -> str:
    """
    Who waits for the ranks that are lost, as the end of a sentence; empty if nobody does.
    """
    those = frozenset(lost)
    waiting = [rank.label for rank in group if rank.running and rank not in those]
    if not waiting:
        return ""
    if all(rank.failure is not None for rank in lost):
        return f"; {'its' if len(lost) == 1 else 'their'} peers wait"
    return f"; {joined(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for it"


def _failed_unix(rank: RankFacts, now: Moment) -> float:
    """
    When the step that failed was last written to: the error came after that.
    """
    head = rank.history.head
    return now.unix if head is None else rank.clock.unix_of(max(head.begin_ns, head.decide_ns))
