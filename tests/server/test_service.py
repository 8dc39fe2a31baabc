"""The server at work, on real flight files behind the real exporter application."""

from pathlib import Path

import httpx2
import pytest
from made_node import MadeRank, Nodes, made_service, poll
from made_ranks import ManualClock

from rankscope_exporter.contract import CONTROL_PATH, MitigationState, Phase, Role
from rankscope_server.domain.model import FindingKind, State

pytestmark = pytest.mark.anyio

A, B = "127.0.0.1", "127.0.0.2"
ONE_NODE = f"chat=http://{A}:9610,role=canary"
TWO_NODES = f"chat=http://{A}:9610,http://{B}:9610"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def nodes(tmp_path: Path, clock: ManualClock) -> Nodes:
    return Nodes(tmp_path / "nodes", clock)


@pytest.fixture
def ranks(nodes: Nodes, clock: ManualClock) -> list[MadeRank]:
    """Two ranks of one engine on one node."""
    directory = nodes.add(A)
    return [MadeRank(directory, pp, clock) for pp in (0, 1)]


@pytest.fixture
async def service(tmp_path: Path, nodes: Nodes, ranks: list[MadeRank]):
    made = made_service(tmp_path, nodes, ONE_NODE)
    await made.start()
    yield made
    await made.close()


def kinds(service, engine="e1"):
    return {finding.kind for finding in service.engine("chat", engine).findings if finding.open}


async def test_what_ranks_do_is_on_the_page(service, ranks):
    """From flight file to view: steps, drift, requests, strip."""
    for rank in ranks:
        rank.steps(1, 30)
    await poll(service)
    view = service.engine("chat", "e1")
    assert (view.state, view.headline) == (State.HEALTHY, "pp0 and pp1 agree up to step 30")
    assert [(rank.label, rank.step, rank.drift_max, rank.guard) for rank in view.ranks] == [
        ("pp0", 30, 0, "broadcast"),
        ("pp1", 30, 0, "broadcast"),
    ]
    assert view.strip.steps == tuple(range(1, 31))
    assert view.fix.can_turn_on
    card = service.fleet().deployments[0]
    assert (card.name, card.state, card.fix_state, card.problems) == ("chat", State.HEALTHY, "available", ())


async def test_only_what_is_new_is_asked_for(service, ranks, nodes):
    """The cursor goes on; a step in flight comes again when it is done."""
    ranks[0].steps(1, 3)
    ranks[0].step(4, Phase.DECIDED)
    await poll(service)
    ranks[0].step(4)
    nodes.seen.clear()
    await poll(service)
    assert all("cursor=" in str(request.url) for request in nodes.seen if request.url.path == "/v1/steps")
    assert service.engine("chat", "e1").ranks[0].phase == "done"


async def test_a_wedge_is_found_and_told(service, ranks, clock):
    """Drift, then masks, then guards, then nothing moves; each rank says what it did last."""
    for step in range(1, 72):
        ranks[0].step(step, drift_max=step, drifting=3, masked=2 if step > 60 else 0)
        ranks[1].step(step)
    await poll(service)
    assert kinds(service) == {FindingKind.DRIFT, FindingKind.MASK_DISAGREEMENT}
    ranks[0].step(72, drift_max=72, drifting=8, masked=8)
    ranks[0].step(73, Phase.STATE_UPDATED, drift_max=73, drifting=8)
    ranks[1].step(72, Phase.DECIDED, role=Role.SENDER)
    decided = clock.now().unix
    clock.advance(0.2)
    await poll(service)
    finding = next(f for f in service.engine("chat", "e1").findings if f.kind is FindingKind.GUARD_DISAGREEMENT)
    assert (finding.step, finding.found_unix - finding.since_unix) == (72, pytest.approx(0.205, abs=0.001))
    assert finding.since_unix == pytest.approx(decided - 0.005, abs=0.001)
    clock.advance(5)
    await poll(service)
    view = service.engine("chat", "e1")
    assert view.state is State.WEDGED
    assert view.ranks[1].last_did == "broadcast posted at step 72 and never left: waiting for pp0 (5.2 s)"
    assert not view.fix.can_turn_on
    assert "wedged" in view.fix.refusal


async def test_a_toggle_reaches_every_rank_for_the_same_step(service, ranks):
    """Accepted, written into both flight files, acknowledged, and all of it in the audit."""
    for rank in ranks:
        rank.steps(1, 30)
    await poll(service)
    outcome = await service.toggle("chat", "e1", desired=True, actor="ada")
    assert (outcome.accepted, outcome.generation, outcome.unsent) == (True, 1, ())
    assert [rank.word for rank in ranks] == [(1, 1, outcome.effective_step, True)] * 2
    assert outcome.effective_step >= 46
    await poll(service)
    assert service.engine("chat", "e1").fix.progress.per_rank[0] == (
        "pp0",
        f"pending, acts at step {outcome.effective_step}",
    )
    for rank in ranks:
        rank.act()
    await poll(service)
    await service.reconcile()
    await service.reconcile()
    view = service.engine("chat", "e1")
    assert (view.fix.state, view.fix.desired, view.fix.last_actor) == ("applied", True, "ada")
    assert (view.fix.progress.acknowledged, view.fix.progress.applied_step_spread) == (2, 0)
    assert view.acted == ()  # the step itself was not recorded here
    ranks[0].steps(31, outcome.effective_step)
    await poll(service)
    (mark,) = service.engine("chat", "e1").acted
    assert (mark.generation, mark.desired, mark.step) == (1, True, outcome.effective_step)
    assert mark.at_unix == pytest.approx(service.board.clock.now().unix - 0.015)
    audit = await service.audit(10)
    assert [(row.actor, row.action) for row in audit] == [
        ("rankscope", "acknowledged"),
        ("ada", "turn the trim fix on"),
    ]
    assert (
        audit[0].outcome
        == f"pp0 applied at step {outcome.effective_step}; pp1 applied at step {outcome.effective_step}"
    )


async def test_a_refused_toggle_is_in_the_audit_and_sends_nothing(service, ranks):
    """Unknown code on one rank is enough; unknown names are refused, too."""
    ranks[1].set_trim(MitigationState.UNKNOWN_CODE)
    await poll(service)
    outcome = await service.toggle("chat", None, desired=True, actor="ada")
    assert not outcome.accepted
    assert "pp1 does not know the code" in outcome.reason
    assert not (await service.toggle("nowhere", None, desired=True, actor="ada")).accepted
    assert not (await service.toggle("chat", "nowhere", desired=True, actor="ada")).accepted
    assert ranks[0].word[1] == 0
    assert [row.outcome.split(":")[0] for row in await service.audit(10)] == ["refused"] * 3


async def test_an_engine_that_comes_up_anew_gets_what_was_wanted(service, ranks, nodes, clock):
    """VLLM was restarted: another engine, generation 0, told before its first step."""
    for rank in ranks:
        rank.steps(1, 30)
    await poll(service)
    await service.toggle("chat", "e1", desired=True, actor="ada")
    for rank in ranks:
        rank.writer.path.unlink()
    anew = [MadeRank(nodes.directory / A, pp, clock, engine="e2") for pp in (0, 1)]
    await poll(service)
    await service.reconcile()
    assert [rank.word for rank in anew] == [(1, 1, 0, True)] * 2
    row = (await service.audit(1))[0]
    assert (row.actor, row.action, row.outcome) == ("rankscope", "turn the trim fix on again", "sent")
    assert service.engine("chat", "e1") is None


async def test_what_was_wanted_outlives_the_server(tmp_path, nodes, ranks):
    """Desired state, audit and disagreements are there after a restart."""
    service = made_service(tmp_path, nodes, ONE_NODE)
    await service.start()
    ranks[0].steps(1, 30)
    ranks[1].steps(1, 29)
    ranks[1].step(30, masked=3)
    await poll(service)
    outcome = await service.toggle("chat", "e1", desired=True, actor="ada")
    assert outcome.accepted
    await service.close()
    for rank in ranks:  # the ring has moved on
        rank.steps(31, 400)
    again = made_service(tmp_path, nodes, ONE_NODE)
    await again.start()
    again.look()  # no exporter has answered yet, which says nothing about the engine
    await poll(again)
    view = again.engine("chat", "e1")
    assert (view.fix.desired, view.fix.last_actor) == (True, "ada")
    assert [finding.step for finding in view.findings if finding.kind is FindingKind.MASK_DISAGREEMENT] == [30]
    assert (await again.toggle("chat", "e1", desired=False, actor="ben")).generation == 2
    await again.close()


async def test_an_exporter_that_fails_is_told_and_does_not_stop_the_others(tmp_path, nodes, clock):
    """Its ranks are blind, with the remedy; when it is back all is well."""
    first, second = MadeRank(nodes.add(A), 0, clock), MadeRank(nodes.add(B), 1, clock)
    service = made_service(tmp_path, nodes, TWO_NODES)
    await service.start()
    first.steps(1, 10)
    second.steps(1, 10)
    await poll(service)
    assert service.fleet().deployments[0].state is State.HEALTHY
    nodes.broken = lambda request: request.url.host == B
    clock.advance(5)
    first.steps(11, 12)
    await poll(service)
    view = service.engine("chat", "e1")
    assert (view.state, view.ranks[0].step, view.ranks[1].step) == (State.BLIND, 12, 10)
    assert f"The exporter of pp1 (http://{B}:9610) last answered 5.0 s ago: connection refused" in view.headline
    assert [(rank.life, rank.steps_per_second is None) for rank in view.ranks] == [
        ("running", False),
        ("unknown", True),
    ]
    assert view.ranks[1].last_did == "took the broadcast of step 10, step done; nothing was heard of it for 5.0 s since"
    assert "see that rankscope-exporter runs there" in service.fleet().deployments[0].problems[0]
    assert not view.fix.can_turn_on
    nodes.broken = lambda _: False
    second.steps(11, 12)
    await poll(service)
    assert service.engine("chat", "e1").state is State.HEALTHY
    await service.close()


async def test_what_a_silent_exporter_spoke_of_last_did_not_go_on_for_ever(tmp_path, nodes, clock):
    """A step in flight when the exporter fell silent has lasted for as long as it was seen to last; nobody knows how fast the engine is."""
    ranks = [MadeRank(nodes.add(A), 0, clock), MadeRank(nodes.add(B), 1, clock)]
    service = made_service(tmp_path, nodes, TWO_NODES)
    await service.start()
    for rank in ranks:
        rank.steps(1, 10)
        rank.step(11, Phase.STATE_UPDATED)
    await poll(service)
    nodes.broken = lambda _: True
    clock.advance(60)
    await poll(service)
    view = service.engine("chat", "e1")
    assert all(rank.in_flight_seconds is not None and rank.in_flight_seconds < 1 for rank in view.ranks)
    assert not any("never left" in rank.last_did for rank in view.ranks)
    assert service.fleet().deployments[0].engines[0].steps_per_second is None
    await service.close()


async def test_an_exporter_that_comes_back_without_an_engine_makes_no_stall(service, ranks, nodes, clock):
    """A node that was started anew, with a step in flight before: nobody saw that step stand still."""
    for rank in ranks:
        rank.steps(1, 20)
        rank.step(21, Phase.STATE_UPDATED)
    await poll(service)
    nodes.broken = lambda _: True
    clock.advance(120)
    await poll(service)
    nodes.broken = lambda request: request.url.path == "/v1/ranks"
    for path in (nodes.directory / A).glob("*.flight"):
        path.unlink()
    await poll(service)
    assert kinds(service) == {FindingKind.BLIND}


async def test_a_command_that_one_exporter_did_not_take_is_sent_again(tmp_path, nodes, clock):
    """The outcome names it; the next tick brings the same command for the same step."""
    first, second = MadeRank(nodes.add(A), 0, clock), MadeRank(nodes.add(B), 1, clock)
    service = made_service(tmp_path, nodes, TWO_NODES)
    await service.start()
    first.steps(1, 10)
    second.steps(1, 10)
    await poll(service)
    nodes.broken = lambda request: request.url.host == B and request.url.path == CONTROL_PATH
    outcome = await service.toggle("chat", "e1", desired=True, actor="ada")
    assert outcome.accepted
    assert len(outcome.unsent) == 1
    assert outcome.unsent[0].startswith(f"http://{B}:9610: connection refused")
    await poll(service)
    await service.reconcile()
    nodes.broken = lambda _: False
    await poll(service)
    await service.reconcile()
    assert second.word == first.word == (1, 1, outcome.effective_step, True)
    actions = [row.action for row in await service.audit(10)]
    assert actions == ["turn the trim fix on again", "turn the trim fix on again", "deliver", "turn the trim fix on"]
    await service.close()


async def test_a_store_that_fails_stops_no_watching(tmp_path, nodes, ranks):
    """It is a problem on the page; a toggle is refused, since nobody would know who did it; later all is kept."""
    blocked = tmp_path / "data"
    blocked.write_text("a file where the directory belongs")
    service = made_service(tmp_path, nodes, ONE_NODE)
    await service.start()
    for rank in ranks:
        rank.steps(1, 10)
    await poll(service)
    await service.keep()
    assert service.engine("chat", "e1").state is State.HEALTHY
    service.board.bump()
    assert "--data-dir" in service.fleet().problems[0]
    outcome = await service.toggle("chat", "e1", desired=True, actor="ada")
    assert "cannot be recorded" in outcome.reason
    blocked.unlink()
    nodes.clock.advance(60)
    await service.keep()
    service.board.bump()
    assert service.fleet().problems == ()
    series = await service.series("chat", "e1", nodes.clock.now().unix - 120, nodes.clock.now().unix, 200)
    assert [max(v for v in values if v is not None) for values in series.values] == [0, 0]
    await service.close()


async def test_a_cursor_that_the_exporter_does_not_know_is_dropped(service, ranks):
    """An exporter of another version answers 400; everything comes again."""
    ranks[0].steps(1, 10)
    await poll(service)
    service.pollers[0].track.cursor = "damaged"
    ranks[0].steps(11, 12)
    await poll(service)
    assert service.engine("chat", "e1").ranks[0].step == 12


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx2.Response(404), "not of vLLM"),
        (httpx2.Response(200, content=b"<html>"), "not understood"),
        (httpx2.Response(200, json={"ranks": 3}), "not understood"),
        (httpx2.Response(307, headers={"location": "http://evil.example"}), "answers 307"),
    ],
)
async def test_an_address_that_is_no_exporter_is_said_plainly(tmp_path, clock, response, words):
    """VLLM's own port, another service, a redirect."""
    service = made_service(tmp_path, Foreign(clock, response), ONE_NODE)
    await poll(service)
    clock.advance(5)
    service.look()
    card = service.fleet().deployments[0]
    assert card.state is State.BLIND
    assert words in card.problems[0]


class Foreign(httpx2.MockTransport):
    """A server that is no exporter."""

    def __init__(self, clock: ManualClock, response: httpx2.Response) -> None:
        super().__init__(lambda _: response)
        self.clock = clock


async def test_streams_wake_up_and_end(service, ranks):
    """A newer version wakes them; shutting down ends them; otherwise they wait no longer than they said."""
    version = service.version
    assert await service.wait_newer(version, 0.01) == version
    await poll(service)
    assert await service.wait_newer(version, 10) > version
    assert service.fleet() is service.fleet()
    service.board.close()
    assert service.closing
    assert await service.wait_newer(service.version, 10) == service.version
