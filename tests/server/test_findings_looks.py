"""Looks one after the other compare what is new, and find what one look at everything finds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ranks import ManualClock, made_engine, made_rank, made_record, made_records, made_report

from rankscope_exporter.contract import Guard, Phase
from rankscope_server.domain.alignment import align_blocks
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.history import StepHistory
from rankscope_server.domain.model import FindingKind

NOW = ManualClock().now()
STEPS = 40
FAULTS = {
    FindingKind.GUARD_DISAGREEMENT: {"guard": Guard.SKIP},
    FindingKind.MASK_DISAGREEMENT: {"mask_hash": 9},
    FindingKind.BATCH_MISMATCH: {"batch_hash": 1},
}

answers = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(1, 9), st.sampled_from([Phase.SCHEDULED, Phase.STATE_UPDATED, Phase.DECIDED])
    ),
    min_size=1,
    max_size=30,
)
"""Which rank is heard of next, how many steps further it is, and the phase of the one in flight."""


@settings(max_examples=60, deadline=None)
@given(answers, st.sampled_from(list(FAULTS)), st.integers(0, 2), st.integers(1, STEPS))
def test_many_looks_find_what_one_look_finds(made, kind, row, step):
    """In whatever pieces the records come, the fault is found at its step, and nothing else is."""
    whole = [made_records(1, STEPS, lambda s, r=r: FAULTS[kind] if (r, s) == (row, step) else {}) for r in range(3)]
    ranks = [made_rank(np.zeros(0, whole[0].dtype), made_report(pp, pp_size=3), now=NOW) for pp in range(3)]
    reached, memory = [0, 0, 0], EngineMemory()

    def look():
        return assess(made_engine(*ranks, now=NOW), memory, NOW)

    for rank, steps, phase in made:
        last = min(STEPS, reached[rank] + steps)
        ranks[rank].history.absorb(whole[rank][max(0, reached[rank] - 1) : last])
        if last < STEPS:
            ranks[rank].history.absorb(
                made_record(
                    last + 1,
                    phase,
                    **(FAULTS[kind] if phase >= Phase.DECIDED and (rank, last + 1) == (row, step) else {}),
                )
            )
        reached[rank] = last
        memory = look()
    for rank in range(3):
        ranks[rank].history.absorb(whole[rank])
    memory = look()
    at_once = assess(made_engine(*ranks, now=NOW), EngineMemory(), NOW)
    assert {key: finding.step for key, finding in memory.findings.items()} == {(kind, 0): step}
    assert {key: finding.step for key, finding in at_once.findings.items()} == {(kind, 0): step}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 60), st.sampled_from(list(Phase))), max_size=6), max_size=90), st.data()
)
def test_a_history_knows_since_where_it_has_changed(made, data):
    """No step below the one that it names is different from what it was at that revision."""
    history, states = StepHistory(32), []
    for answer in made:
        states.append((history.revision, {int(r["step"]): r.tobytes() for r in history.tail(32)}))
        if answer:
            history.absorb(np.concatenate([made_record(step, phase) for step, phase in answer]))
    if not states:
        return
    revision, before = data.draw(st.sampled_from(states))
    after = {int(record["step"]): record.tobytes() for record in history.tail(32)}
    changed = [step for step, content in after.items() if before.get(step) != content]
    assert history.changed_since(revision) <= min(changed, default=history.last + 1)


@given(st.integers(1, 500), st.integers(0, 400), st.integers(1, 4), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_blocks_cover_each_step_once_with_what_is_before_it(first, count, ranks, before):
    """However many they are, and no step that the rings have lost."""
    histories = [StepHistory(256) for _ in range(ranks)]
    last = first + count
    blocks = list(align_blocks(histories, first, last, before))
    held = max(first, last - 255)
    covered = [
        int(step)
        for number, block in enumerate(blocks)
        for step in block.steps[block.steps >= (held if number == 0 else blocks[number - 1].steps[-1] + 1)]
    ]
    assert covered == list(range(held, last + 1))
    assert all(int(block.steps[0]) >= 1 for block in blocks)
