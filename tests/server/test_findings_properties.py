"""Whatever healthy traffic looks like, nothing is found; whatever is put in is found at its step."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ranks import ManualClock, made_engine, made_rank, made_record, made_report

from rankscope_exporter.contract import Guard, Phase
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.model import FindingKind

NOW = ManualClock().now()


@st.composite
def traffic(draw):
    """A healthy engine: sizes, its steps, and how far each rank has come at each look."""
    pp_size, tp_size = draw(st.sampled_from([(2, 1), (3, 1), (2, 2), (4, 1)]))
    steps = draw(st.integers(5, 60))
    masked = draw(st.lists(st.integers(0, 4), min_size=steps, max_size=steps))
    drift = draw(st.lists(st.integers(-3, 0), min_size=steps, max_size=steps))
    looks = draw(st.lists(st.integers(1, steps), min_size=1, max_size=8).map(sorted))
    ranks = [(pp, tp) for pp in range(pp_size) for tp in range(tp_size)]
    skews = draw(
        st.lists(
            st.lists(st.integers(0, pp_size + 1), min_size=len(looks), max_size=len(looks)),
            min_size=len(ranks),
            max_size=len(ranks),
        )
    )
    phases = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=len(ranks), max_size=len(ranks)))
    torn = draw(st.sets(st.tuples(st.integers(0, len(ranks) - 1), st.integers(1, steps)), max_size=5))
    return pp_size, tp_size, steps, masked, drift, looks, ranks, skews, phases, torn


def record_of(made, rank, step, phase=Phase.DONE, **changes):
    _, _, _, masked, drift, *_ = made
    fields = {"drift_max": drift[step - 1] if phase >= Phase.STATE_UPDATED else 0} | changes
    return made_record(step, phase, requests=4, masked=masked[step - 1], **fields)


def looks_at(made, changes=None):
    """The memories after each look, with `changes[rank, step]` put into the records."""
    pp_size, tp_size, _, _, _, looks, ranks, skews, phases, torn = made
    memory = EngineMemory()
    for number, reached in enumerate(looks):
        facts = []
        for index, (pp, tp) in enumerate(ranks):
            last = max(1, reached - skews[index][number])
            records = [
                record_of(made, index, step, **(changes or {}).get((index, step), {}))
                for step in range(1, last)
                if (index, step) not in torn
            ]
            records.append(record_of(made, index, last, Phase(phases[index])))
            if phases[index] == Phase.DONE and changes:
                records[-1] = record_of(made, index, last, **changes.get((index, last), {}))
            report = made_report(pp, tp_rank=tp, pp_size=pp_size, tp_size=tp_size)
            facts.append(made_rank(np.concatenate(records), report, now=NOW, quiet=0.1))
        memory = assess(made_engine(*facts, now=NOW), memory, NOW)
        yield memory, facts


@settings(max_examples=60, deadline=None)
@given(traffic())
def test_healthy_traffic_with_skew_and_holes_has_no_finding(made):
    """Ranks some steps apart, in any phase, with records that were lost, and drift below zero."""
    for memory, _ in looks_at(made):
        assert [finding.sentence for finding in memory.all_findings] == []


@settings(max_examples=60, deadline=None)
@given(traffic(), st.data())
def test_an_injected_guard_disagreement_is_found_at_its_step(made, data):
    """Found in the look in which a second rank has decided, and never before; at the first step that is known on both."""
    _, _, steps, masked, _, _, ranks, _, _, torn = made
    rank = data.draw(st.integers(0, len(ranks) - 1))
    step = data.draw(st.integers(1, steps))
    honest = Guard.SKIP if masked[step - 1] == 4 else Guard.BROADCAST
    changes = {(rank, step): {"guard": Guard.BROADCAST if honest == Guard.SKIP else Guard.SKIP}}
    for memory, facts in looks_at(made, changes):

        def knows(index, facts=facts):
            record = facts[index].history.take(np.array([step], np.uint64))[0]
            return record["phase"] >= Phase.DECIDED and (index, step) not in torn

        changed = knows(rank) and facts[rank].history.take(np.array([step], np.uint64))[0]["guard"] != honest
        expected = changed and any(knows(index) for index in range(len(ranks)) if index != rank)
        found = memory.findings.get((FindingKind.GUARD_DISAGREEMENT, 0))
        if expected:
            assert found is not None
            assert found.step == step
        if found is None:
            assert not expected
