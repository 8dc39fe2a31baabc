"""
Cases of batches: ranks that were given, or gave themselves, different requests to run.
"""

from case_engine import RankTape, Shape
from made_case import Case, Made, Verdict, ran

from rankscope_exporter.contract import Phase
from rankscope_server.domain.model import FindingKind

BATCH, WEDGED, STALLED = FindingKind.BATCH_MISMATCH, FindingKind.WEDGED, FindingKind.STALLED
MASK, GUARD = FindingKind.MASK_DISAGREEMENT, FindingKind.GUARD_DISAGREEMENT
ELSEWHERE = 0x5DEECE66D
"""What a rolling hash is off by once a batch was another one."""


def calm(seed: int, **changes: object) -> Shape:
    """
    Traffic without speculation: nothing but the batch can differ.
    """
    return Shape(seed=seed, draft_tokens=0, arrivals=0.3, **changes)  # type: ignore[arg-type]


def part(tape: RankTape, step: int, *, steps: int | None = None, **changes: int) -> None:
    """
    From `step` on this rank runs another batch: `changes` to its counts, for so many steps or for good; the hash for ever.
    """
    tape.since(step)["batch_hash"] ^= ELSEWHERE
    rows = tape.since(step)[:steps]
    for name, change in changes.items():
        rows[name] = (rows[name].astype(int) + change).clip(0)


def orphaned_after_abort() -> Made:
    """An aborted request stays in the batches of the second rank for good; both go on."""
    shape = calm(44)
    _, (first, last) = ran(100, shape)
    part(last, 61, cached=1, scheduled_tokens=1, requests=1, finished=-1)
    return Made(shape, [first, last], (Verdict(BATCH, 61, ("pp0", "pp1")),), waited_seconds=0.5)


def abort_between_consensus_and_use() -> Made:
    """A request is aborted after the ranks agreed to run it: the first runs it, the second has dropped it, and both hang."""
    shape = calm(45)
    _, (first, last) = ran(100, shape)
    part(last, 71, cached=-1, scheduled_tokens=-1)
    first.hang(71, Phase.STATE_UPDATED)
    last.hang(71, Phase.STATE_UPDATED)
    both = ("pp0", "pp1")
    return Made(shape, [first, last], (Verdict(BATCH, 71, both), Verdict(WEDGED, 71, both)))


def grammar_ready_at_different_times() -> Made:
    """A request whose grammar is ready on one rank and not yet on the other is scheduled on the one alone."""
    shape = calm(46)
    _, (first, last) = ran(100, shape)
    part(first, 66, steps=1, new=1, scheduled_tokens=40, requests=1)
    part(last, 66, steps=0)
    last.since(66)["batch_hash"] ^= ELSEWHERE << 4
    first.hang(68, Phase.STATE_UPDATED)
    last.hang(67, Phase.STATE_UPDATED)
    both = ("pp0", "pp1")
    return Made(shape, [first, last], (Verdict(BATCH, 66, both), Verdict(WEDGED, 67, both)))


def clocks_of_their_own() -> Made:
    """Eight tensor-parallel ranks abort by their own clocks: one drops a request that is over its time, seven still run it."""
    shape = calm(47, pp_size=1, tp_size=8)
    _, tapes = ran(100, shape)
    part(tapes[5], 81, cached=-1, scheduled_tokens=-1)
    for tape in tapes:
        tape.hang(81, Phase.STATE_UPDATED)
    return Made(shape, tapes, (Verdict(BATCH, 81, ()), Verdict(WEDGED, 81, ())))


def every_rank_its_own_scheduler() -> Made:
    """Four stages schedule by themselves, and one of them takes a request earlier than the others."""
    shape = calm(52, pp_size=4)
    _, tapes = ran(100, shape)
    part(tapes[2], 77, new=1, scheduled_tokens=30, requests=1, steps=1)
    for tape in tapes:
        tape.hang(78, Phase.STATE_UPDATED)
    every = ("pp0", "pp1", "pp2", "pp3")
    return Made(shape, tapes, (Verdict(BATCH, 77, every), Verdict(WEDGED, 78, every)))


def ended_on_one_rank() -> Made:
    """A request ends on the first rank; the second is not told, and goes on with it."""
    shape = calm(53)
    _, (first, last) = ran(100, shape)
    part(last, 58, cached=1, scheduled_tokens=1, requests=1, finished=-1)
    first.stop_after(64)
    last.hang(65, Phase.STATE_UPDATED)
    return Made(shape, [first, last], (Verdict(BATCH, 58, ("pp0", "pp1")), Verdict(WEDGED, 65, ("pp1",))))


def extra_step_at_the_drain() -> Made:
    """When the batch drains one rank takes an empty step that the other does not: all later ordinals are off by one."""
    shape = calm(32)
    _, (first, last) = ran(100, shape)
    extra = 86
    later = first.records[extra - 1 :].copy()
    last.records[extra:] = last.records[extra - 1 : -1].copy()
    for name in ("new", "cached", "scheduled_tokens", "finished", "guard", "role", "posted", "requests", "decide_ns", "mask_known"):  # fmt: skip
        last.at(extra)[name] = 0
    last.records["step"][:] = range(1, len(last.records) + 1)
    for name in ("begin_ns", "decide_ns", "end_ns"):
        moved = last.records[name][extra - 1 :]
        moved[:] = later[name] * (moved > 0)
    last.since(extra)["batch_hash"] ^= ELSEWHERE
    first.stop_after(95)
    last.hang(96, Phase.STATE_UPDATED)
    verdicts = (Verdict(BATCH, extra, ("pp0", "pp1")), Verdict(WEDGED, 96, ("pp1",)))
    return Made(shape, [first, last], verdicts, along=(MASK, GUARD))


def stale_request_state() -> Made:
    """The second rank learns of finished requests late, by another way than the batch: it runs one that is gone, for a few steps."""
    shape = calm(16, vllm_version="0.23.0")
    _, (first, last) = ran(100, shape)
    part(last, 50, steps=3, cached=1, scheduled_tokens=1, requests=1)
    return Made(shape, [first, last], (Verdict(BATCH, 50, ("pp0", "pp1")),), waited_seconds=0.5)


def batch_that_half_of_the_ranks_ran() -> Made:
    """Of eight stages the first four begin a batch that never reaches the others: those have nothing to do."""
    shape = calm(43, pp_size=8)
    _, tapes = ran(100, shape)
    for tape in tapes:
        if tape.pp_rank < 4:
            tape.hang(92, Phase.STATE_UPDATED)
        else:
            tape.stop_after(91)
    return Made(shape, tapes, (Verdict(STALLED, 92, ("pp0", "pp1", "pp2", "pp3")),))


CASES = (
    Case(
        "orphaned-after-abort",
        "An aborted request is never taken out of the second rank's batch.",
        ("SGLang issue 26912", "SGLang pull request 27028"),
        orphaned_after_abort,
    ),
    Case(
        "abort-between-consensus-and-use",
        "A request is aborted between the ranks' agreement to run it and its use: one runs it, the other does not.",
        ("SGLang issue 31030", "SGLang pull request 31869"),
        abort_between_consensus_and_use,
    ),
    Case(
        "grammar-ready-at-different-times",
        "A grammar is compiled on one rank sooner than on the other, and each schedules what it has.",
        ("SGLang pull request 30747",),
        grammar_ready_at_different_times,
    ),
    Case(
        "clocks-of-their-own",
        "Eight ranks abort requests that take too long, each by its own clock.",
        ("SGLang issue 27221",),
        clocks_of_their_own,
    ),
    Case(
        "every-rank-its-own-scheduler",
        "Each pipeline rank schedules for itself, and one takes a request earlier.",
        ("TensorRT-LLM pull request 9659",),
        every_rank_its_own_scheduler,
    ),
    Case(
        "ended-on-one-rank",
        "The end of a request is not agreed upon: one rank goes on with it.",
        ("TensorRT-LLM pull request 7455",),
        ended_on_one_rank,
    ),
    Case(
        "extra-step-at-the-drain",
        "An empty step at the end of the batch is taken by one rank only.",
        ("vLLM issue 43547",),
        extra_step_at_the_drain,
    ),
    Case(
        "stale-request-state",
        "Request state travels by a way of its own and arrives late: a rank runs a request that is over.",
        ("vllm-ascend pull request 11076",),
        stale_request_state,
    ),
    Case(
        "batch-that-half-of-the-ranks-ran",
        "A batch runs on the first half of eight stages and never reaches the second, whose queues are empty.",
        ("SGLang issue 34572", "SGLang issue 34569"),
        batch_that_half_of_the_ranks_ran,
    ),
)
