"""
What the made engines of the simulation are held to: without it, "no false alarm" would say little.
"""

from random import Random

import numpy as np
import pytest
from sim_engine import MadeEngine, make_engine
from sim_exporter import MadeExporter
from sim_oddities import Counts, Oddity
from sim_shape import draw_shape

from rankscope_exporter.contract import Guard, Phase, Role, StepsFrame
from rankscope_exporter.flight import layout

STEPS = 600
SHARED = (
    "step", "batch_hash", "new", "cached", "finished", "scheduled_tokens", "drafting", "requests", "masked", "mask_hash", "mask_known", "guard",
    "posted", "scheduler_sum", "scheduler_max", "mitigation", "lengths", "broadcasts_total", "skips_total", "posted_total",
)  # fmt: skip


@pytest.fixture(scope="module", params=range(4))
def engine(request: pytest.FixtureRequest) -> MadeEngine:
    random = Random(request.param)
    shape = draw_shape(random)
    return make_engine("e", shape, STEPS, 0.0, [10**12] * shape.nodes, random, Counts())


def test_ranks_are_told_the_same_and_decide_alike(engine: MadeEngine) -> None:
    """Whatever follows from the scheduler's word is equal on all ranks, totals included."""
    first = engine.tapes[0].records
    for tape in engine.tapes[1:]:
        for name in SHARED:
            np.testing.assert_array_equal(tape.records[name], first[name], name)


def test_ranks_are_no_further_apart_than_steps_in_flight(engine: MadeEngine) -> None:
    """No rank begins a step before the last one has left the step that is `depth` before it, and skew does occur."""
    depth, last = engine.shape.depth, engine.tapes[-1]
    for tape in engine.tapes:
        assert (tape.begin[depth:] >= last.end[:-depth]).all()
        assert (tape.begin <= tape.state).all()
        assert (tape.state <= tape.end).all()
        assert (tape.begin[1:] >= tape.end[:-1]).all()


def test_what_a_later_stage_is_handed_was_computed_before(engine: MadeEngine) -> None:
    """A stage decides after the stage before it has computed."""
    by_stage = {tape.id.pp_rank: tape for tape in engine.tapes}
    for pp in range(1, engine.shape.pp_size):
        known = engine.tapes[0].records["requests"] > 0
        assert (by_stage[pp].decide[known] > by_stage[pp - 1].state[known]).all()


def test_guards_follow_from_masks(engine: MadeEngine) -> None:
    """A rank skips where all its requests are masked, broadcasts where one is not, and decides nothing without any."""
    records = engine.tapes[0].records
    decided = records["requests"] > 0
    assert ((records["guard"] != Guard.NONE) == decided).all()
    assert ((records["mask_hash"] != 0) == (records["masked"] > 0)).all()
    if engine.shape.guarded and engine.shape.masked:
        assert ((records["guard"] == Guard.SKIP) == (decided & (records["masked"] == records["requests"]))).all()


def test_an_answer_holds_no_more_than_was_written(engine: MadeEngine) -> None:
    """The newest record of each rank is cut off at its phase, and comes again, further on, after the cursor."""
    exporter = MadeExporter(0, Random(1), Counts(), 10**12, 0.0, tapes=engine.tapes)
    cursor, partial = "", 0
    start, end = float(engine.tapes[0].begin[0]), engine.last_end
    seen = {tape.key: np.zeros(STEPS, bool) for tape in engine.tapes}
    for at in np.linspace(start, end + 1, 150):
        frame = StepsFrame.decode(exporter.steps(float(at), cursor))
        cursor = frame.header.cursor
        for head, records in zip(frame.header.ranks, frame.records, strict=True):
            assert (records["phase"][:-1] == Phase.DONE).all()
            assert (records["begin_ns"] <= exporter.monotonic_ns(float(at)) + 1).all()
            seen[head.key][records["step"][records["phase"] == Phase.DONE].astype(int) - 1] = True
            if len(records) and records["phase"][-1] < Phase.DONE:
                partial += 1
                raw = records.view(np.uint8).reshape(len(records), layout.STEP_DTYPE.itemsize)
                reach = {1: layout.PART_STATE_OFFSET, 2: layout.PART_DECIDED_OFFSET, 3: layout.PART_DONE_OFFSET}
                assert not raw[-1, reach[int(records["phase"][-1])] : layout.FAILED_OFFSET].any()
    assert partial > 0
    if engine.shape.ring >= STEPS:
        assert all(whole.all() for whole in seen.values())


def test_roles_are_those_of_the_pipeline(engine: MadeEngine) -> None:
    """The last stage sends, the others receive, where there is a decision."""
    for tape in engine.tapes:
        decided = tape.records["requests"] > 0
        role = Role.SENDER if tape.id.pp_rank == engine.shape.pp_size - 1 else Role.RECEIVER
        assert (tape.records["role"][decided] == role).all()


def test_the_same_seed_makes_the_same_engine() -> None:
    """A false alarm can be looked at again."""

    def made() -> tuple[MadeEngine, Counts]:
        random, counts = Random(7), Counts()
        shape = draw_shape(random)
        return make_engine("e", shape, 200, 0.0, [0] * shape.nodes, random, counts), counts

    (one, counted), (other, again) = made(), made()

    assert [tape.records.tobytes() for tape in one.tapes] == [tape.records.tobytes() for tape in other.tapes]
    assert counted == again
    assert counted[Oddity.CHUNKED] > 0
