"""A rank whose life its exporter cannot tell: shown as unknown, never as well and never as lost."""

from made_ranks import ManualClock, made_engine, made_rank, made_records, made_report

from rankscope_exporter.contract import RankLife
from rankscope_server.domain.findings import EngineMemory, assess
from rankscope_server.domain.model import FindingKind, State
from rankscope_server.domain.state import engine_state
from rankscope_server.domain.toggle import plan_toggle
from rankscope_server.domain.words import last_did

NOW = ManualClock().now()


def engine():
    ranks = [made_rank(made_records(1, 50), made_report(pp, life=RankLife.UNKNOWN), now=NOW) for pp in (0, 1)]
    return made_engine(*ranks, now=NOW)


def test_it_is_blind_and_not_lost():
    """The finding says that it is unknown, with the remedy; nothing else is concluded."""
    memory = assess(engine(), EngineMemory(), NOW)
    assert {finding.kind for finding in memory.all_findings if finding.open} == {FindingKind.BLIND}
    sentence = memory.findings[FindingKind.BLIND, -1].sentence
    assert "whether pp0 lives is unknown" in sentence
    assert "shareProcessNamespace: true" in sentence


def test_the_engine_is_not_shown_as_well():
    """Healthy is only what is known to be so."""
    facts = engine()
    assert engine_state(facts, assess(facts, EngineMemory(), NOW)) is State.BLIND


def test_no_toggle_while_it_is_unknown():
    """A toggle needs every rank, and the refusal names the remedy."""
    facts = engine()
    plan = plan_toggle(
        "chat",
        [facts],
        memories={facts.engine: assess(facts, EngineMemory(), NOW)},
        rates={facts.engine: 20.0},
        now=NOW,
        desired=True,
    )
    assert "pp0 and pp1 run is unknown" in plan.refusal
    assert "process namespace" in plan.refusal


def test_its_last_words_say_so():
    """What it did last is told with what is not known of it."""
    facts = engine()
    assert last_did(facts.ranks[0], facts.ranks, NOW).endswith("; whether its process lives is unknown")
