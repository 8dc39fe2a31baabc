"""Runbooks that the server serves."""

from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI

from rankscope_server.domain.alert_notice import runbook_path
from rankscope_server.domain.alert_rules import RULES
from rankscope_server.runbooks import install_runbooks, runbooks_dir

pytestmark = pytest.mark.anyio


def client(directory: Path) -> httpx2.AsyncClient:
    app = FastAPI()
    install_runbooks(app, directory)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://here")


async def test_every_alert_has_a_runbook_at_the_address_that_it_names():
    """As plain text, without a network."""
    async with client(runbooks_dir()) as asking:
        for name in RULES:
            response = await asking.get(runbook_path(name))
            assert response.status_code == 200, name
            assert response.headers["content-type"].startswith("text/plain")
            assert "Mitigation" in response.text


@pytest.mark.parametrize("name", ["Nonsense", "..%2Fsecret", "%2Fetc%2Fpasswd", "RankscopeDrift.md"])
async def test_no_other_file_is_served(name, tmp_path: Path):
    """Whatever the name."""
    (tmp_path / "secret.md").write_text("secret")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "RankscopeDrift.md").write_text("a runbook")
    async with client(tmp_path / "books") as asking:
        response = await asking.get(f"/runbooks/{name}")
    assert response.status_code == 404
    assert "secret" not in response.text
