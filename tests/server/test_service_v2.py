"""The server at work on the V2 model runner: real flight files behind the real exporter application."""

from pathlib import Path
from typing import Any

import pytest
from made_node import MadeRank, Nodes, made_service, node_ns, poll
from made_ranks import ManualClock

from rankscope_exporter.contract import Lengths, MitigationState, Phase, Role
from rankscope_exporter.flight import layout
from rankscope_server.domain.model import DeviceView, ExchangeView, FindingKind, HostLengths, QueueView, State

pytestmark = pytest.mark.anyio

A = "127.0.0.1"
V2 = {"lengths": Lengths.COMPUTED_TOKENS, "width": 4, "posted": 3}


class MadeV2Rank(MadeRank):
    """A rank with the V2 runner."""

    def __init__(self, directory: Path, pp_rank: int, clock: ManualClock) -> None:
        super().__init__(directory, pp_rank, clock, runner="V2", vllm_version="0.32.0", completes=True)
        self.set_trim(MitigationState.NOT_APPLICABLE)
        self.last = pp_rank == 1

    def step(self, step: int, phase: Phase = Phase.DONE, **fields: Any) -> None:
        own = {"role": Role.SENDER} if self.last else {"queue_depth": 2, "queue_filled": 1, "dropped_total": 7}
        done = {"completed_total": 3 * step} if phase is Phase.DONE else {}
        super().step(step, phase, **(V2 | own | done | {"posted_total": 3 * step} | fields))

    def sample(self, excess: int, samples: int, step: int) -> None:
        """Write a sample of device-side lengths, taken now."""
        values = (2, 32, samples, step, node_ns(self.clock), 900, 892, 8, 2 * (excess > 0), excess, min(excess, 0))
        layout.DEVICE.pack_into(self.writer.device, 0, *values)

    def fail(self, step: int, phase: Phase, method: str, kind: str) -> None:
        """An error of vLLM ends a step."""
        self.step(step, phase, failed=1)
        self.writer.live[layout.LIVE_FAILED_STEP] = step
        self.writer.live[layout.LIVE_FAILED_STEPS] += 1
        failure = {"step": step, "phase": int(phase), "method": method, "kind": kind}
        self.writer.write_report({"hooks": [], "mitigations": [], "failure": failure})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def nodes(tmp_path: Path, clock: ManualClock) -> Nodes:
    return Nodes(tmp_path / "nodes", clock)


@pytest.fixture
def ranks(nodes: Nodes, clock: ManualClock) -> list[MadeV2Rank]:
    directory = nodes.add(A)
    return [MadeV2Rank(directory, pp, clock) for pp in (0, 1)]


@pytest.fixture
async def service(tmp_path: Path, nodes: Nodes, ranks: list[MadeV2Rank]):
    made = made_service(tmp_path, nodes, f"chat=http://{A}:9610")
    await made.start()
    yield made
    await made.close()


async def test_what_v2_ranks_do_is_on_the_page(service, ranks, clock):
    """Their side of the exchange, queue and host lengths; drift unknown with the remedy; no toggle."""
    for rank in ranks:
        rank.steps(1, 30)
    await poll(service)
    view = service.engine("chat", "e1")
    assert (view.state, view.runner) == (State.HEALTHY, "V2")
    first, last = view.ranks
    assert (first.exchange, last.exchange) == (ExchangeView(30, 4, 3, 90, 90), ExchangeView(30, 4, 3, 90, 90))
    assert (first.queue, last.queue) == (QueueView(2, 1, 7), None)
    assert first.host_lengths == HostLengths(800, 100, 0)
    assert (first.drift_max, first.device) == (None, None)
    assert "RANKSCOPE_DEVICE_LENGTHS_STEPS" in view.drift_unknown
    assert (view.fix.state, view.fix.can_turn_on, view.fix.refusal) == (
        "not applicable",
        False,
        "not applicable on V2: it keeps no output tokens to trim",
    )
    now = clock.now().unix
    series = await service.series("chat", "e1", now - 60, now + 1, 60)
    assert {value for values in series.values for value in values} == {None}
    assert set(service.fleet().deployments[0].sparkline) == {None}


async def test_samples_of_device_lengths_are_charted_once_each_and_drift_is_found(service, ranks, clock):
    """A sample stands at the second at which it was taken, however often it is reported; its age grows on the page."""
    for rank in ranks:
        rank.steps(1, 30)
    taken = int(clock.now().unix)
    ranks[0].sample(5, 1, 28)
    ranks[1].sample(-1, 1, 28)
    await poll(service)
    for _ in range(3):
        clock.advance(0.9)
        for rank in ranks:
            rank.step(31)
        await poll(service)
    view = service.engine("chat", "e1")
    assert view.state is State.DRIFTING
    assert view.ranks[0].device == DeviceView(28, pytest.approx(2.7), 32, 8, 2, 5, 0)
    assert (view.ranks[0].drift_max, view.ranks[1].drift_max, view.drift_unknown) == (5, -1, "")
    series = await service.series("chat", "e1", taken - 5, taken + 5, 100)
    known = [
        {at: value for at, value in zip(series.times_unix, values, strict=True) if value is not None}
        for values in series.values
    ]
    assert known == [{taken: 5.0}, {taken: -1.0}]


async def test_a_failed_step_is_found_from_its_record_and_then_told_in_full(service, ranks, clock):
    """One poll of steps is enough for the finding; the report adds method and class."""
    for rank in ranks:
        rank.steps(1, 33)
    ranks[0].step(34, Phase.DECIDED)
    ranks[1].step(34, Phase.STATE_UPDATED)
    await poll(service)
    assert service.engine("chat", "e1").state is State.HEALTHY
    ranks[1].fail(34, Phase.STATE_UPDATED, "sample_tokens", "AssertionError")
    await service.pollers[0].poll_steps()
    service.look()
    view = service.engine("chat", "e1")
    assert view.state is State.RANK_LOST
    assert view.headline == "pp1 failed in step 34, after the state was updated; its peers wait"
    assert (view.ranks[1].failed, view.ranks[1].phase) == (True, "state updated, then failed")
    await poll(service)
    finding = service.engine("chat", "e1").findings[0]
    assert (finding.kind, finding.step) == (FindingKind.RANK_LOST, 34)
    assert finding.sentence == (
        "pp1 failed in step 34, in sample_tokens after the state was updated: AssertionError; its peers wait"
    )
    ranks[1].step(35)
    await poll(service)
    assert not any(f.open for f in service.engine("chat", "e1").findings if f.kind is FindingKind.RANK_LOST)
