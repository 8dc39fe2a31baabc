"""Requests whose ids were left out."""

import re
from pathlib import Path

import anyio
import httpx2
import pytest
from made_node import MadeRank, Nodes
from made_ranks import ManualClock

from rankscope_server.app import create_app
from rankscope_server.settings import load_settings


@pytest.mark.anyio
async def test_requests_without_ids_are_told_apart(tmp_path: Path):
    """Each has a row and an element of its own, and the page says that ids are left out rather than show an empty cell."""
    nodes = Nodes(tmp_path / "nodes", ManualClock())
    rank = MadeRank(nodes.add("127.0.0.1"), 0, nodes.clock, pp_size=1)
    rank.steps(1, 9, drift_max=3, drifting=2)
    rank.writer.write_requests([(9, 4, 20, 17, 3, 6, 0, 0, b""), (9, 5, 12, 10, 2, 6, 0, 0, b"")], 2)
    settings = load_settings(None, ["chat=http://127.0.0.1:9610"], {"data_dir": tmp_path / "data"})
    app = create_app(settings, clock=nodes.clock, transport=nodes)
    page = ""
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1:8700") as client,
    ):
        with anyio.fail_after(60):
            while "left out" not in page:
                await anyio.sleep(0.01)
                page = (await client.get("/deployments/chat/engines/e1")).text

    rows = re.findall(r'<tr id="(request-[^"]+)">', page)
    assert len(rows) == len(set(rows)) == page.count(">left out<") == 2
