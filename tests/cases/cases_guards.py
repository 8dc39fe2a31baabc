"""
Cases of the guard and of the exchange behind it: who posts what, and who does not.
"""

import numpy as np
from case_engine import CaseEngine, RankTape, Shape
from made_case import Case, Made, Verdict, ran

from rankscope_exporter.contract import Guard, Phase, Role
from rankscope_server.domain.model import FindingKind

GUARD, WIDTH, WEDGED = FindingKind.GUARD_DISAGREEMENT, FindingKind.WIDTH_MISMATCH, FindingKind.WEDGED
STALLED, LOST = FindingKind.STALLED, FindingKind.RANK_LOST
BOTH = ("pp0", "pp1")


def prefill_only_step(tapes: list[RankTape], after: int = 20) -> int:
    """
    The first step after `after` in which every request is masked on all ranks alike.
    """
    skips = np.flatnonzero((tapes[0].records["guard"] == Guard.SKIP) & (tapes[0].records["step"] > after))
    return int(tapes[0].records["step"][skips[0]])


def prefill_alone() -> Shape:
    """
    Traffic in which a long prompt now and then runs alone, so that every request of a step is masked.
    """
    return Shape(seed=14, draft_tokens=0, arrivals=0.04, outputs=(5, 20), long_prompts=0.5, slots=4)


def chunked_prefill_that_all_skip() -> Made:
    """All ranks skip alike."""
    shape = prefill_alone()
    _, tapes = ran(160, shape)
    assert prefill_only_step(tapes)
    return Made(shape, tapes, waited_seconds=0.5)


def chunked_prefill_that_all_broadcast() -> Made:
    """Before there was a guard: every step is broadcast and received, also where no token comes of it."""
    shape = prefill_alone()
    _, tapes = ran(160, shape)
    for tape in tapes:
        skipped = (tape.records["guard"] == Guard.SKIP) & (tape.records["phase"] >= Phase.DECIDED)
        tape.records["guard"][skipped], tape.records["posted"][skipped] = Guard.BROADCAST, 1
    return Made(shape, tapes, waited_seconds=0.5)


def guard_on_one_side_only() -> Made:
    """The sender has no guard, the receiver has: the first step of prompts alone hangs the sender."""
    shape = prefill_alone()
    _, (first, last) = ran(160, shape)
    step = prefill_only_step([first, last])
    last.at(step)["guard"], last.at(step)["posted"] = Guard.BROADCAST, 1
    last.hang(step, Phase.DECIDED)
    first.hang(step + 1, Phase.STATE_UPDATED)
    return Made(shape, [first, last], (Verdict(GUARD, step, BOTH), Verdict(WEDGED, step, BOTH)))


def gate_that_flips_once() -> Made:
    """After two hundred steps in agreement a gate that each rank works out for itself answers differently for one step."""
    shape = Shape(seed=54, draft_tokens=0, arrivals=0.3)
    _, (first, last) = ran(260, shape)
    step = 241
    first.at(step)["guard"], first.at(step)["posted"] = Guard.SKIP, 0
    last.hang(step, Phase.DECIDED)
    first.hang(step + 1, Phase.STATE_UPDATED)
    return Made(shape, [first, last], (Verdict(GUARD, step, BOTH), Verdict(WEDGED, step, BOTH)))


def gate_that_flips_once_in_an_undated_copy() -> Made:
    """The same in a copy that does not say when it was made: that they hang is not known, that they parted is."""
    made = gate_that_flips_once()
    return Made(made.shape, made.tapes, made.verdicts[:1], waited_seconds=None)


def last_rank_waits_to_receive() -> Made:
    """The last rank takes the way of a receiver: everybody waits for a broadcast that nobody sends."""
    shape = Shape(seed=22, draft_tokens=0, arrivals=0.3, vllm_version="0.19.1")
    _, tapes = ran(60, shape)
    for tape in tapes:
        tape.hang(41, Phase.DECIDED)
    tapes[1].at(41)["role"] = Role.RECEIVER
    return Made(shape, tapes, (Verdict(STALLED, 41, BOTH),))


def receive_without_a_send() -> Made:
    """The receiver posts its side at the first decode step; the sender leaves the step without having come to it."""
    shape = Shape(seed=21, draft_tokens=0, arrivals=0.3)
    _, (first, last) = ran(60, shape)
    first.hang(31, Phase.DECIDED)
    for name in ("guard", "role", "posted", "width", "requests", "masked", "mask_hash", "mask_known", "decide_ns"):
        last.at(31)[name] = 0
    last.stop_after(31)
    return Made(shape, [first, last], (Verdict(STALLED, 31, ("pp0",)),))


def broadcast_twice() -> Made:
    """The sender broadcasts a step twice, of which one decision is recorded; the second is paired with the next step's receive."""
    shape = Shape(seed=23, draft_tokens=0, arrivals=0.3)
    _, tapes = ran(60, shape)
    for tape in tapes:
        tape.hang(32, Phase.DECIDED)
    return Made(shape, tapes, (Verdict(STALLED, 32, BOTH),))


def first_decode_asserts() -> Made:
    """The first step with drafts fails an assertion about its width on the last rank, and the first one waits."""
    shape = Shape(seed=49, arrivals=0.3, fix=True)
    _, (first, last) = ran(20, shape)
    step = int(np.flatnonzero(last.records["drafting"] > 0)[0]) + 1
    last.fail(step, Phase.STATE_UPDATED, "sample_tokens", "AssertionError")
    first.hang(step, Phase.DECIDED)
    return Made(shape, [first, last], (Verdict(LOST, step, ("pp1",)),))


def sampler_wide_against_one_column() -> Made:
    """On V1 the sender's tensor is as wide as the sampler's and the receiver's has one column: both wait, of one opinion."""
    shape = Shape(seed=5, arrivals=0.3, fix=True, vllm_version="0.28.0")
    _, tapes = ran(60, shape)
    for tape in tapes:
        tape.hang(33, Phase.DECIDED)
    return Made(shape, tapes, (Verdict(STALLED, 33, BOTH),))


def empty_batch_on_the_last_rank() -> Made:
    """A step without requests reaches the last rank, which asserts that there are some; its peer waits."""
    shape = Shape(seed=25, draft_tokens=0, arrivals=0.3, vllm_version="0.20.2")
    _, (first, last) = ran(60, shape)
    for tape in (first, last):
        tape.at(45)["new"] = tape.at(45)["cached"] = tape.at(45)["scheduled_tokens"] = 0
    last.fail(45, Phase.STATE_UPDATED, "sample_tokens", "AssertionError")
    first.hang(45, Phase.STATE_UPDATED)
    return Made(shape, [first, last], (Verdict(LOST, 45, ("pp1",)),))


def v2(seed: int, pp_size: int = 2, *, steps: int = 90) -> tuple[Shape, CaseEngine, list[RankTape]]:
    """
    A healthy V2 engine.
    """
    shape = Shape(seed=seed, pp_size=pp_size, runner="V2", vllm_version="0.32.0", arrivals=0.3)
    engine, tapes = ran(steps, shape)
    return shape, engine, tapes


def one_column_against_all() -> Made:
    """A step without drafts: the sender's tensor has one column, the receivers wait for all. Every rank has joined."""
    shape, _, (first, last) = v2(11)
    last.at(51)["width"] = 1
    first.hang(51, Phase.DECIDED)
    last.hang(51, Phase.DECIDED)
    return Made(shape, [first, last], (Verdict(WIDTH, 51, BOTH), Verdict(WEDGED, 51, BOTH)))


def drafts_that_are_not_sent() -> Made:
    """Of eight stages the last one sends two messages of a step and the others wait for three: the next step pairs the wrong ones."""
    shape, _, tapes = v2(10, pp_size=8)
    last = tapes[-1]
    last.at(61)["posted"] = 2
    last.since(61)["posted_total"] -= 1
    for tape in tapes[:-1]:
        tape.hang(62, Phase.DECIDED)
    last.hang(62, Phase.DECIDED)
    every = tuple(f"pp{n}" for n in range(8))
    return Made(shape, tapes, (Verdict(WIDTH, 61, every), Verdict(WEDGED, 62, every)))


def verify_batch_trimmed_differently() -> Made:
    """When the batch drains, each rank trims what is verified by its own measure: three columns here, four there."""
    shape, _, (first, last) = v2(36)
    last.at(71)["width"] = 3
    first.hang(71, Phase.DECIDED)
    last.hang(71, Phase.DECIDED)
    return Made(shape, [first, last], (Verdict(WIDTH, 71, BOTH), Verdict(WEDGED, 71, BOTH)))


def next_turn_too_soon() -> Made:
    """Without asynchronous scheduling a request comes round before its tokens were received, and the first rank's kernel fails."""
    shape = Shape(seed=8, runner="V2", vllm_version="0.30.0", arrivals=0.3, async_scheduling=False)
    _, (first, last) = ran(60, shape)
    first.fail(47, Phase.STATE_UPDATED, "execute_model", "AcceleratorError")
    last.hang(47, Phase.SCHEDULED)
    return Made(shape, [first, last], (Verdict(LOST, 47, ("pp0",)),))


CASES = (
    Case(
        "chunked-prefill-that-all-skip",
        "Long prompts run alone, and all ranks skip the collective alike: good health.",
        ("vLLM pull request 38726",),
        chunked_prefill_that_all_skip,
    ),
    Case(
        "chunked-prefill-that-all-broadcast",
        "Without a guard every rank takes part in a broadcast from which no token comes: slow, and of one opinion.",
        ("vLLM pull request 38726",),
        chunked_prefill_that_all_broadcast,
    ),
    Case(
        "guard-on-one-side-only",
        "Only the receiver asks whether all requests are prompts being read: the sender waits for it for ever.",
        ("vllm-ascend pull request 8468",),
        guard_on_one_side_only,
    ),
    Case(
        "gate-that-flips-once",
        "A gate that each rank works out by itself flips for one step after hundreds in agreement.",
        ("TensorRT-LLM pull request 14020",),
        gate_that_flips_once,
    ),
    Case(
        "gate-that-flips-once-undated",
        "The same, and the copy does not say when it was made.",
        ("TensorRT-LLM pull request 14020",),
        gate_that_flips_once_in_an_undated_copy,
    ),
    Case(
        "last-rank-waits-to-receive",
        "The last rank enters the receive path: all wait, and nobody sends.",
        ("vLLM pull request 40749",),
        last_rank_waits_to_receive,
    ),
    Case(
        "receive-without-a-send",
        "A receive is posted, and the send was lost when code was moved: the first decode step never ends.",
        ("vllm-omni pull request 7393",),
        receive_without_a_send,
    ),
    Case(
        "broadcast-twice",
        "The sampled tokens of a step are broadcast twice.",
        ("vLLM pull request 33701",),
        broadcast_twice,
    ),
    Case(
        "first-decode-asserts",
        "An assertion about the width of the sampled tokens ends the first step with drafts.",
        ("vLLM issue 49355",),
        first_decode_asserts,
    ),
    Case(
        "sampler-wide-against-one-column",
        "A tensor as wide as the sampler's meets a receive of one column on V1, where widths need not be equal.",
        ("vLLM pull request 49443",),
        sampler_wide_against_one_column,
    ),
    Case(
        "empty-batch-on-the-last-rank",
        "A step without requests ends in an assertion on the last rank.",
        ("vLLM issue 41612",),
        empty_batch_on_the_last_rank,
    ),
    Case(
        "one-column-against-all",
        "On V2 a broadcast of one column meets receives of all columns: everybody has joined, and nobody leaves.",
        ("vLLM pull request 46994",),
        one_column_against_all,
    ),
    Case(
        "drafts-that-are-not-sent",
        "Eight stages on two nodes, and one message of a step is never sent.",
        ("vLLM issue 53402",),
        drafts_that_are_not_sent,
    ),
    Case(
        "verify-batch-trimmed-differently",
        "Ranks trim the batch to verify by measures of their own, and differ as the batch drains.",
        ("vLLM issue 54011",),
        verify_batch_trimmed_differently,
    ),
    Case(
        "next-turn-too-soon",
        "A request's next turn comes before its tokens have arrived, and a kernel of the first rank fails.",
        ("vLLM issue 52071", "vLLM pull request 52179"),
        next_turn_too_soon,
    ),
)
