"""How often an exporter is asked."""

from pathlib import Path

import anyio
import httpx2
import pytest
from made_node import MadeRank, Nodes, made_service
from made_ranks import ManualClock

from rankscope_exporter.contract import RANKS_PATH, REQUESTS_PATH, STEPS_PATH
from rankscope_server.ingest.poller import MAX_BACK_OFF_SECONDS, back_off


def test_failures_are_tried_again_less_and_less_often():
    """Up to a few seconds, and spread."""
    waits = [back_off(failures, 0.25, 1.0) for failures in range(8)]
    assert waits == sorted(waits)
    assert waits[0] == 0.25
    assert waits[-1] == MAX_BACK_OFF_SECONDS == 4.0
    assert back_off(5, 0.25, 0.0) < back_off(5, 0.25, 1.0)


@pytest.mark.anyio
async def test_an_exporter_that_hangs_delays_no_other(tmp_path: Path):
    """Each has loops of its own; requests are asked for only while something drifts."""
    clock = ManualClock()
    nodes = Nodes(tmp_path / "nodes", clock)
    rank = MadeRank(nodes.add("127.0.0.1"), 0, clock, pp_size=1)
    rank.steps(1, 5)
    hung = anyio.Event()

    class Hanging(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if request.url.host == "127.0.0.2":
                hung.set()
                await anyio.sleep_forever()
            return await nodes.handle_async_request(request)

    hanging = Hanging()
    hanging.clock = clock
    service = made_service(tmp_path, hanging, "chat=http://127.0.0.1:9610", "other=http://127.0.0.2:9610")
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.run)
            await hung.wait()
            while sum(request.url.path == STEPS_PATH for request in nodes.seen) < 10:
                await anyio.sleep(0.005)
            assert REQUESTS_PATH not in {request.url.path for request in nodes.seen}
            rank.steps(6, 9, drift_max=3, drifting=1)
            while REQUESTS_PATH not in {request.url.path for request in nodes.seen}:
                await anyio.sleep(0.005)
            assert RANKS_PATH in {request.url.path for request in nodes.seen}
            tasks.cancel_scope.cancel()
    await service.close()
