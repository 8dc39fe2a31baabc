"""The whole application: pages, API and own metrics over a real exporter, behind all checks."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx2
import pytest
from made_node import TOKEN, MadeRank, Nodes
from made_ranks import ManualClock

from rankscope_server.app import create_app
from rankscope_server.auth import password_line
from rankscope_server.settings import ConfigError, load_settings

pytestmark = pytest.mark.anyio


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    made = Nodes(tmp_path / "nodes", ManualClock())
    directory = made.add("127.0.0.1")
    for pp in (0, 1):
        MadeRank(directory, pp, made.clock).steps(1, 30)
    return made


def settings(tmp_path: Path, **flags):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    return load_settings(
        None, [f"chat=http://127.0.0.1:9610,role=canary,token-file={token}"], {"data_dir": tmp_path / "data", **flags}
    )


@pytest.fixture
async def client(tmp_path: Path, nodes: Nodes) -> AsyncIterator[httpx2.AsyncClient]:
    app = create_app(settings(tmp_path), clock=nodes.clock, transport=nodes)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1:8700") as made,
    ):
        with anyio.fail_after(30):
            while not (await made.get("/api/v1/fleet")).json()["deployments"][0]["engines"]:
                await anyio.sleep(0.01)
        yield made


async def test_pages_and_api_show_what_was_polled(client: httpx2.AsyncClient):
    """The loops run, and both say the same."""
    engine = (await client.get("/api/v1/deployments/chat/engines/e1")).json()
    assert (engine["state"], engine["headline"]) == ("healthy", "pp0 and pp1 agree up to step 30")
    for path in ("/", "/deployments/chat/engines/e1", "/audit"):
        response = await client.get(path)
        assert response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "agree up to step 30" in (await client.get("/deployments/chat/engines/e1")).text


async def test_a_toggle_through_the_api_reaches_the_flight_files(client: httpx2.AsyncClient):
    """And who did it is in the audit."""
    response = await client.post("/api/v1/deployments/chat/engines/e1/fix", json={"desired": True})
    assert response.json()["accepted"], response.text
    engine = (await client.get("/api/v1/deployments/chat/engines/e1")).json()
    assert (engine["fix"]["desired"], engine["fix"]["last_actor"]) == (True, "local")
    assert (await client.get("/api/v1/audit")).json()[0]["actor"] == "local"


async def test_a_page_of_another_origin_cannot_toggle(client: httpx2.AsyncClient):
    """Nothing happens, nothing is recorded."""
    headers = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    response = await client.post("/api/v1/deployments/chat/engines/e1/fix", json={"desired": True}, headers=headers)
    assert response.status_code == 403
    assert (await client.get("/api/v1/audit")).json() == []


async def test_own_metrics_tell_how_polling_goes(client: httpx2.AsyncClient):
    """Polls, ranks and findings; and a health answer for supervisors."""
    text = (await client.get("/metrics")).text
    assert 'rankscope_server_ranks{deployment="chat",exporter="http://127.0.0.1:9610"} 2.0' in text
    assert 'rankscope_server_polls_total{deployment="chat",exporter="http://127.0.0.1:9610",path="/v1/steps"}' in text
    assert 'rankscope_server_findings_open{deployment="chat",kind="wedged"} 0.0' in text
    assert (await client.get("/healthz")).json()["ok"] is True


async def test_with_a_password_file_everything_asks(tmp_path: Path, nodes: Nodes):
    """Pages, API, metrics and static files; the user's name is in the audit."""
    users = tmp_path / "users"
    users.write_text(password_line("ada", "correct horse") + "\n")
    users.chmod(0o600)
    app = create_app(settings(tmp_path, password_file=users, host="0.0.0.0"), clock=nodes.clock, transport=nodes)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://dash.example") as client,
    ):
        for path in ("/", "/api/v1/fleet", "/metrics", "/healthz", "/static/icon.svg"):
            assert (await client.get(path)).status_code == 401
        client.auth = ("ada", "correct horse")
        assert (await client.get("/")).status_code == 200
        await client.post("/api/v1/deployments/chat/fix", json={"desired": True})
        assert (await client.get("/api/v1/audit")).json()[0]["actor"] == "ada"


def test_a_password_file_that_others_can_read_is_refused(tmp_path: Path):
    """Before anything listens."""
    users = tmp_path / "users"
    users.write_text(password_line("ada", "correct horse") + "\n")
    users.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        create_app(settings(tmp_path, password_file=users))
