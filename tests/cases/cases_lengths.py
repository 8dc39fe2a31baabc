"""
Cases of request lengths: they grow on one rank and not on another, or go their own way without harm.
"""

import numpy as np
from case_engine import CaseEngine, RankTape, Shape
from made_case import Case, Made, Verdict, ran

from rankscope_exporter.contract import Phase
from rankscope_server.domain.model import FindingKind

DRIFT, MASK = FindingKind.DRIFT, FindingKind.MASK_DISAGREEMENT
GUARD, WEDGED = FindingKind.GUARD_DISAGREEMENT, FindingKind.WEDGED

BUSY = Shape(seed=54260, acceptance=0.8, arrivals=0.12, slots=6)
PARTS_BY = 600
"""Steps within which the engines here part; they stop when they do."""


def first_lasting_drift(tape: RankTape, reach: int) -> int:
    """
    The first step that drifts and has another one that does within `reach` steps.
    """
    above = tape.records["step"][tape.records["drift_max"] > 0].astype(int)
    return int(above[:-1][np.diff(above) <= reach][0])


def first_difference(tapes: list[RankTape], field: str, phase: Phase) -> int:
    """
    The first step at which two ranks have different values in a field that both of them wrote.
    """
    shortest = min(len(tape.records) for tape in tapes)
    rows = np.stack([tape.records[:shortest] for tape in tapes])
    differs = (rows[field] != rows[field][0]).any(axis=0) & (rows["phase"] >= phase).all(axis=0)
    return int(differs.argmax()) + 1


def parted(shape: Shape) -> Made:
    """
    An engine whose request lengths grow on all ranks but the last one, until every request is masked there.
    """
    engine, tapes = ran(PARTS_BY, shape)
    assert engine.parted_at is not None
    every = tuple(f"pp{tape.pp_rank}" for tape in tapes)
    return Made(
        shape,
        tapes,
        (
            Verdict(DRIFT, first_lasting_drift(tapes[0], shape.pp_size), every[:-1]),
            Verdict(MASK, first_difference(tapes, "mask_hash", Phase.DECIDED), every),
            Verdict(GUARD, engine.parted_at, every),
            Verdict(WEDGED, engine.parted_at, every),
        ),
    )


def trim_on_last_rank_only() -> Made:
    """Two stages."""
    return parted(BUSY)


def trim_on_last_rank_of_four() -> Made:
    """Four stages, on two nodes."""
    return parted(Shape(seed=4, pp_size=4, acceptance=0.85, arrivals=0.1, slots=6))


def all_drafts_rejected() -> Made:
    """Every step adds as many tokens as there are drafts: no time is left."""
    return parted(Shape(seed=3, acceptance=0.0, arrivals=0.1, slots=4, draft_tokens=2))


def trim_on_every_rank() -> Made:
    """The same traffic as the first case, and the fix on."""
    shape = Shape(seed=54260, acceptance=0.8, arrivals=0.12, slots=6, fix=True)
    return Made(shape, ran(200, shape)[1])


def drift_before_anything_else() -> Made:
    """The copy is made after some steps of drift, while fresh requests still keep the guards together."""
    engine = CaseEngine(BUSY)
    while not engine.ranks[0].rows or engine.ranks[0].rows[-1]["drifting"] < 2:
        engine.run(1)
    engine.run(4)
    tapes = engine.tapes()
    verdicts = [Verdict(DRIFT, first_lasting_drift(tapes[0], 2), ("pp0",))]
    if engine.parted_at is None and (tapes[0].records["mask_hash"] != tapes[1].records["mask_hash"]).any():
        verdicts.append(Verdict(MASK, first_difference(tapes, "mask_hash", Phase.DECIDED), ("pp0", "pp1")))
    return Made(BUSY, tapes, tuple(verdicts), waited_seconds=0.1)


def placeholders_of_a_grammar() -> Made:
    """A request with a grammar keeps two placeholders too many on the first rank; then advancing the grammar fails on the last."""
    shape = Shape(seed=26, draft_tokens=1, arrivals=0.15, fix=True)
    _, (first, last) = ran(90, shape)
    drifting = first.since(80)
    drifting["drift_max"], drifting["drift_sum"], drifting["drifting"] = 2, 2, 1
    drifting["state_sum"] += 2
    first.hang(90, Phase.STATE_UPDATED)
    last.fail(89, Phase.STATE_UPDATED, "sample_tokens", "AssertionError")
    return Made(
        shape,
        [first, last],
        (Verdict(DRIFT, 80, ("pp0",)), Verdict(FindingKind.RANK_LOST, 89, ("pp1",))),
    )


def device_lengths_left_uncorrected(seed: int, field: str) -> Made:
    """
    A V2 engine whose first rank samples lengths on its device that were never corrected for what was rejected.
    """
    shape = Shape(seed=seed, runner="V2", vllm_version="0.32.0", arrivals=0.2)
    _, (first, last) = ran(120, shape)
    sampled = 96
    rows = int(first.at(sampled)["cached"][0])
    base = {"every": 32, "samples": 3, "step": sampled, "taken_ns": int(first.at(sampled)["end_ns"][0]), "rows": rows}
    first.device = base | {"excess_rows": rows, "total_excess": 0, "computed_excess": 0, field: 5}
    last.device = base | {"excess_rows": 0, "total_excess": 0, "computed_excess": 0}
    return Made(shape, [first, last], (Verdict(DRIFT, sampled, ("pp0",)),), waited_seconds=0.5)


def computed_tokens_corrected_on_the_last_rank() -> Made:
    """Tokens that count as computed were rejected, and only the last rank learns so."""
    return device_lengths_left_uncorrected(12, "computed_excess")


def optimistic_lengths_on_the_host() -> Made:
    """The device is told lengths that the host took for granted."""
    return device_lengths_left_uncorrected(18, "total_excess")


def one_step_too_long() -> Made:
    """Now and then a request is one token too long on a rank for one step, and right in the next."""
    shape = Shape(seed=51, arrivals=0.3, fix=True)
    _, tapes = ran(120, shape)
    for step in (30, 55, 90):
        tapes[0].at(step)["drift_max"] = tapes[0].at(step)["drift_sum"] = tapes[0].at(step)["drifting"] = 1
        tapes[0].at(step)["state_sum"] += 1
    return Made(shape, tapes, waited_seconds=0.5)


def counted_late() -> Made:
    """Without asynchronous scheduling ranks count a step's tokens only in the next one: shorter, never longer."""
    shape = Shape(seed=61, draft_tokens=0, arrivals=0.3, fix=False, async_scheduling=False)
    _, tapes = ran(120, shape)
    for tape in tapes[:1]:
        cached = tape.records["cached"] > 0
        tape.records["drift_max"][cached] = -1
        tape.records["drift_sum"][cached] = -tape.records["cached"][cached].astype(np.int64)
    return Made(shape, tapes, waited_seconds=0.5)


def last_token_of_a_preempted_request() -> Made:
    """A request is preempted in its last step: its last token is dropped, on all ranks, and it comes back one shorter."""
    shape = Shape(seed=40, arrivals=0.3, fix=True)
    _, tapes = ran(120, shape)
    for tape in tapes:
        back = tape.records[60:62]
        back["drift_max"], back["drift_sum"] = 0, -1
        back["state_sum"] -= 1
    return Made(shape, tapes, waited_seconds=0.5)


CASES = (
    Case(
        "trim-on-last-rank-only",
        "Rejected drafts are taken off on the last rank only: the first one believes ever longer requests, masks them, and skips.",
        ("vLLM issue 54260",),
        trim_on_last_rank_only,
    ),
    Case(
        "trim-on-last-rank-of-four",
        "The same with four stages on two nodes: three ranks drift alike, and all three skip what the last one broadcasts.",
        ("vLLM issue 54260",),
        trim_on_last_rank_of_four,
    ),
    Case(
        "all-drafts-rejected",
        "With every draft rejected, lengths grow by the number of drafts each step, and the first batch already parts the ranks.",
        ("1Cat-vLLM pull request 574",),
        all_drafts_rejected,
    ),
    Case(
        "trim-on-every-rank",
        "The traffic of the first case with rejected drafts taken off on every rank: nothing happens.",
        ("vLLM pull request 54270",),
        trim_on_every_rank,
    ),
    Case(
        "drift-before-anything-else",
        "Lengths have begun to grow, and the guards still agree: there is time left.",
        ("vLLM issue 54260",),
        drift_before_anything_else,
    ),
    Case(
        "placeholders-of-a-grammar",
        "A request with a grammar keeps more placeholders than the scheduler counts, until its grammar cannot be advanced.",
        ("vLLM issue 45014",),
        placeholders_of_a_grammar,
    ),
    Case(
        "computed-tokens-corrected-on-the-last-rank",
        "On V2 the number of computed tokens is corrected after a rejection on the last rank only, as samples of the device show.",
        ("vLLM issue 44697",),
        computed_tokens_corrected_on_the_last_rank,
    ),
    Case(
        "optimistic-lengths-on-the-host",
        "A rank that is not the last computes with lengths in which every draft was accepted.",
        ("vllm-ascend pull request 16007",),
        optimistic_lengths_on_the_host,
    ),
    Case(
        "one-step-too-long",
        "A request is too long for single steps, and right again in the next: that is no drift.",
        (),
        one_step_too_long,
    ),
    Case(
        "counted-late",
        "Ranks that count tokens a step late are shorter than the scheduler, which is as it should be.",
        (),
        counted_late,
    ),
    Case(
        "last-token-of-a-preempted-request",
        "A request is preempted in its last step, and its last token is dropped everywhere: ranks agree.",
        ("vLLM pull request 50297",),
        last_token_of_a_preempted_request,
    ),
)
