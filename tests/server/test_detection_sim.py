"""
Detection over simulated traffic, in short; the benchmarks `false_alarms` and `faults` are the long form.
"""

import pytest
from sim_faults import KINDS, FaultKind
from sim_healthy import Outcome, run_healthy
from sim_inject import Injection

from rankscope_server.domain.findings import STICKY
from rankscope_server.domain.model import FindingKind

STEPS = 20_000
INJECTIONS = 5


def test_healthy_traffic_gives_no_finding() -> None:
    """Whatever is legitimate is no finding, but an exporter that is out of reach is said, then and only then."""
    total = Outcome()
    seed = 0
    while total.steps < STEPS:
        total.add(run_healthy(seed, 5_000))
        seed += 1

    assert total.alarms == []
    assert total.unsaid == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_fault_is_found_under_its_name(kind: FaultKind) -> None:
    """Found at its step, with its ranks, soon after the evidence was there, and nothing else is said that is not so."""
    done: list[Injection] = []
    seed = 0
    while len(done) < INJECTIONS:
        one = Injection(seed, kind).run()
        seed += 1
        if one.fault is not None:
            done.append(one)

    assert [one.seed for one in done if one.found_at is None] == []
    assert [(one.seed, one.wrong) for one in done if one.wrong] == []
    assert [one.seed for one in done if not one.right_ranks] == []
    if kind.kind is not FindingKind.BLIND:
        assert [(one.seed, one.step) for one in done if not one.right_step] == []
    if kind.kind in STICKY:
        assert max(one.delay for one in done if one.delay is not None) <= 1.0
    if kind.kind is FindingKind.STALLED:
        assert not any(one.diverged for one in done)
