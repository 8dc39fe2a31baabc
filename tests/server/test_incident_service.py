"""From flight files to an incident with its evidence, through the real exporter application and the server at work."""

import json
from pathlib import Path

import pytest
from made_node import MadeRank, Nodes, made_service, poll
from made_ranks import ManualClock

from rankscope_exporter.contract import Phase, Role
from rankscope_server.domain.incident import IncidentLife
from rankscope_server.incidents.perfetto import trace_json
from rankscope_server.incidents.reading import CaptureFile

pytestmark = pytest.mark.anyio

A = "127.0.0.1"
ONE_NODE = f"chat=http://{A}:9610"


async def test_a_wedge_leaves_an_incident_with_its_evidence(tmp_path: Path):
    """Drift, masks, guards, a wedge; a restart of the server; a restart of vLLM: one incident all the way."""
    clock = ManualClock()
    nodes = Nodes(tmp_path / "nodes", clock)
    directory = nodes.add(A)
    ranks = [MadeRank(directory, pp, clock) for pp in (0, 1)]
    service = made_service(tmp_path, nodes, ONE_NODE)
    await service.start()
    for rank in ranks:
        rank.steps(1, 49)
    await poll(service)
    assert await service.incidents(9) == ()
    for step in range(50, 72):
        clock.advance(0.02)
        ranks[0].step(step, drift_max=step, drifting=3, masked=2 if step > 60 else 0)
        ranks[1].step(step)
        await poll(service)
    await service.keep()
    ranks[0].step(72, drift_max=72, drifting=8, masked=8)
    ranks[0].step(73, Phase.STATE_UPDATED, drift_max=73, drifting=8)
    ranks[1].step(72, Phase.DECIDED, role=Role.SENDER)
    clock.advance(0.2)
    await poll(service)
    clock.advance(5)
    await poll(service)
    await service.keep()
    (card,) = await service.incidents(9)
    view = await service.incident(card.id)
    data = await service.capture(card.id, 1)
    assert service.engine("chat", "e1").incident == card.id
    assert card.life is IncidentLife.WEDGED
    assert card.sentence == (
        "pp0 stopped receiving at step 72: it believed all 8 requests were prefill; pp1 broadcast. Drift began at step 50. "
        "Output is wrong since step 61, where masked requests first differed. The engine is wedged until it is restarted."
    )
    told = ["found", "worsening", "captured", "found", "wedged", "captured"]
    assert [event.what for event in view.timeline] == told
    capture = CaptureFile(data)
    assert [(rank.label, rank.last_step) for rank in capture.manifest.ranks] == [("pp0", 73), ("pp1", 72)]
    assert json.loads(trace_json(data))["traceEvents"]
    await service.close()

    again = made_service(tmp_path, nodes, ONE_NODE)
    await again.start()
    again.look()  # before an exporter has answered
    await poll(again)
    await again.keep()
    assert [one.id for one in await again.incidents(9)] == [card.id]
    assert [event.what for event in (await again.incident(card.id)).timeline] == told
    for rank in ranks:
        rank.writer.path.unlink()
    for pp in (0, 1):
        MadeRank(directory, pp, clock, engine="e2")
    await poll(again)
    (closed,) = await again.incidents(9)
    assert (closed.id, closed.life) == (card.id, IncidentLife.CLOSED)
    await again.close()
