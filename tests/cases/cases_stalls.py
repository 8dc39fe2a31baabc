"""
Cases of ranks that stand still and have not parted, as far as their records tell: frozen equal, never a divergence.
"""

from case_engine import Shape
from made_case import Case, Made, Verdict, ran

from rankscope_exporter.contract import Phase
from rankscope_server.domain.model import FindingKind

STALLED = FindingKind.STALLED


def frozen(shape: Shape, step: int, phase: Phase, *, waited_seconds: float = 30.0) -> Made:
    """
    All ranks are in the same phase of the same step, and stay there.
    """
    _, tapes = ran(step + 4, shape)
    for tape in tapes:
        tape.hang(step, phase)
    return Made(shape, tapes, (Verdict(STALLED, step, ()),), waited_seconds=waited_seconds)


def plain(seed: int, **changes: object) -> Shape:
    """
    Traffic without speculation.
    """
    return Shape(seed=seed, draft_tokens=0, arrivals=0.3, **changes)  # type: ignore[arg-type]


def sample_tokens_times_out() -> Made:
    """The engine waits for the ranks' answer to a step that none of them leaves, with speculation and asynchronous scheduling."""
    return frozen(Shape(seed=34, arrivals=0.3, fix=True, vllm_version="0.23.0"), 83, Phase.DECIDED, waited_seconds=90)


def kernels_that_are_missing() -> Made:
    """Sixteen ranks: the first decode after warm-up never ends, as its kernels are not there."""
    return frozen(plain(35, tp_size=8, vllm_version="0.22.1"), 12, Phase.STATE_UPDATED)


def waiting_for_an_event() -> Made:
    """All ranks wait for the same event of their devices."""
    return frozen(plain(39, tp_size=4, vllm_version="0.23.0"), 57, Phase.DECIDED)


def collectives_that_part_below_the_steps() -> Made:
    """Four ranks launched different numbers of collectives in the same step: what they do within it is in no record."""
    return frozen(plain(30, pp_size=1, tp_size=4, vllm_version="0.23.0"), 51, Phase.STATE_UPDATED)


def seven_steps_and_no_more() -> Made:
    """Four ranks stop in their seventh step, equal in everything; the engine was still warming up, which may take its time."""
    return frozen(plain(31, pp_size=1, tp_size=4), 7, Phase.STATE_UPDATED, waited_seconds=200)


def warm_up_that_hangs() -> Made:
    """The first step never ends, and more time has passed than any compilation takes."""
    return frozen(plain(50), 1, Phase.STATE_UPDATED, waited_seconds=120)


def warm_up_that_takes_its_time() -> Made:
    """The first step compiles for half a minute, and is nothing to be told of yet."""
    shape = plain(50)
    made = frozen(shape, 1, Phase.STATE_UPDATED, waited_seconds=40)
    return Made(shape, made.tapes, waited_seconds=40)


def decode_that_never_comes() -> Made:
    """Prompts are read, and the first decode step stops all four ranks of two stages."""
    return frozen(plain(24, tp_size=2, vllm_version="0.22.1"), 14, Phase.DECIDED, waited_seconds=700)


def drafter_skipped_by_some() -> Made:
    """Two of four tensor-parallel ranks skip the drafter near the longest length; the others wait in its collectives."""
    shape = Shape(seed=28, pp_size=1, tp_size=4, arrivals=0.3, fix=True, vllm_version="0.23.0")
    _, tapes = ran(70, shape)
    for tape in tapes[:2]:
        tape.hang(63, Phase.STATE_UPDATED)
    for tape in tapes[2:]:
        tape.stop_after(63)
    return Made(shape, tapes, (Verdict(STALLED, 63, ("pp0 tp0", "pp0 tp1")),))


def one_rank_in_the_model_one_before_it() -> Made:
    """A rank gathers logits while its peer waits for the next requests, each in a collective of its own."""
    shape = plain(48, pp_size=1, tp_size=2)
    _, (first, second) = ran(70, shape)
    first.hang(59, Phase.STATE_UPDATED)
    second.stop_after(59)
    return Made(shape, [first, second], (Verdict(STALLED, 59, ("pp0 tp0",)),))


def relay_without_a_turn() -> Made:
    """The thread that hands requests on gets no turn: the first rank is as far ahead as it may be, and all wait."""
    shape = plain(55, pp_size=4)
    _, tapes = ran(80, shape)
    for tape in tapes:
        tape.hang(72 - tape.pp_rank, Phase.STATE_UPDATED)
    return Made(shape, tapes, (Verdict(STALLED, 69, ()),))


def send_of_new_requests_blocks() -> Made:
    """The first rank sends new requests on and waits for the send to end; the second waits for the batch before."""
    shape = plain(56)
    _, (first, last) = ran(80, shape)
    first.hang(66, Phase.SCHEDULED)
    last.stop_after(65)
    return Made(shape, [first, last], (Verdict(STALLED, 66, ("pp0",)),))


def heart_that_beats() -> Made:
    """A collective never ends while every process answers: only the step tells."""
    return frozen(plain(58, pp_size=1, tp_size=2), 77, Phase.STATE_UPDATED, waited_seconds=200)


def replicas_out_of_step() -> list[Made]:
    """One data-parallel replica returns early from an empty step, the other one waits for it inside."""
    waits = Shape(seed=27, pp_size=1, tp_size=2, draft_tokens=0, arrivals=0.3, dp_rank=0, dp_size=2)
    idle = Shape(seed=28, pp_size=1, tp_size=2, draft_tokens=0, arrivals=0.3, dp_rank=1, dp_size=2)
    return [
        frozen(waits, 54, Phase.STATE_UPDATED),
        Made(idle, ran(50, idle)[1]),
    ]


def four_silent_replicas() -> list[Made]:
    """Four replicas with requests running make no token any more."""
    shapes = [Shape(seed=42, pp_size=1, tp_size=2, draft_tokens=0, arrivals=0.3, dp_rank=n, dp_size=4) for n in range(4)]  # fmt: skip
    return [frozen(shape, 40, Phase.DECIDED) for shape in shapes]


def a_long_prefill() -> Made:
    """A step of a long prompt takes four seconds on all ranks, and goes on."""
    shape = plain(60)
    _, tapes = ran(100, shape)
    for tape in tapes:
        for name in ("begin_ns", "decide_ns", "end_ns"):
            times = tape.records[name]
            times[60:][times[60:] > 0] += 4_000_000_000
        tape.records["decide_ns"][59] += 3_900_000_000
        tape.records["end_ns"][59] += 3_900_000_000
    return Made(shape, tapes, waited_seconds=0.5)


def nothing_to_do() -> Made:
    """All requests are done, and for ten minutes none has come."""
    shape = Shape(seed=62, arrivals=0.3, fix=True)
    return Made(shape, ran(100, shape)[1], waited_seconds=600)


CASES = (
    Case(
        "sample-tokens-times-out",
        "No rank leaves a step, and what asks for its tokens times out.",
        ("vLLM issue 40926",),
        sample_tokens_times_out,
    ),
    Case(
        "kernels-that-are-missing",
        "The kernels for the device are missing, so that the first decode never ends, equally on sixteen ranks.",
        ("vLLM issue 41530",),
        kernels_that_are_missing,
    ),
    Case(
        "waiting-for-an-event",
        "Every rank waits for an event of its device, in the same place.",
        ("vLLM issue 41725",),
        waiting_for_an_event,
    ),
    Case(
        "collectives-that-part-below-the-steps",
        "Ranks launch different collectives within a step; their steps stand still, equal.",
        ("vLLM issue 48720", "vLLM issue 46097"),
        collectives_that_part_below_the_steps,
    ),
    Case(
        "seven-steps-and-no-more",
        "Four ranks stand in their seventh step, with the same word about everything.",
        ("vLLM issue 48720",),
        seven_steps_and_no_more,
    ),
    Case("warm-up-that-hangs", "The first step never ends.", ("SGLang issue 17941",), warm_up_that_hangs),
    Case("warm-up-that-takes-its-time", "The first step compiles.", (), warm_up_that_takes_its_time),
    Case(
        "decode-that-never-comes",
        "Prompts are read at full speed, and no token is ever decoded.",
        ("vLLM issue 45094",),
        decode_that_never_comes,
    ),
    Case(
        "drafter-skipped-by-some",
        "Some ranks skip the drafter and leave the step, the others wait in it.",
        ("vLLM issue 44185", "vLLM issue 44954", "vLLM pull request 49027", "vLLM issue 44063", "SGLang issue 29144"),
        drafter_skipped_by_some,
    ),
    Case(
        "one-rank-in-the-model-one-before-it",
        "Two ranks wait in different collectives, one in the model, one for requests.",
        ("SGLang issue 33289", "vLLM issue 16477"),
        one_rank_in_the_model_one_before_it,
    ),
    Case(
        "relay-without-a-turn",
        "A thread between the ranks is starved: they stand some steps apart, as they may.",
        ("TensorRT-LLM pull request 16170",),
        relay_without_a_turn,
    ),
    Case(
        "send-of-new-requests-blocks",
        "Sending new requests to the next rank blocks the first one.",
        ("TensorRT-LLM pull request 10665",),
        send_of_new_requests_blocks,
    ),
    Case(
        "heart-that-beats",
        "A collective is wedged while every heartbeat is there.",
        ("omlx issue 3040",),
        heart_that_beats,
    ),
    Case(
        "replicas-out-of-step",
        "Of two data-parallel replicas one leaves an empty step early.",
        ("vLLM pull request 28774",),
        replicas_out_of_step,
    ),
    Case(
        "four-silent-replicas",
        "Four data-parallel replicas hang with requests running.",
        ("tt-vllm issue 387",),
        four_silent_replicas,
    ),
    Case("long-prefill", "A step takes four seconds because its prompt is long.", (), a_long_prefill),
    Case("nothing-to-do", "An engine is idle.", (), nothing_to_do),
)
