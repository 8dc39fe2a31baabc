"""
The JSON of the views.
"""

import fake_rankscope as views
import pytest
from fake_rankscope import ENGINES, FakeRankscope
from starlette.testclient import TestClient

from rankscope_server.domain.model import EngineView, FleetView
from rankscope_server.web.wire import to_wire, wire_model

ENGINE = f"/api/v1/deployments/wedge/engines/{ENGINES['wedge']}"


def test_fleet(client: TestClient) -> None:
    """The fleet by JSON: states by their label, unknown as null."""
    cards = {card["name"]: card for card in client.get("/api/v1/fleet").json()["deployments"]}
    assert cards["wedge"]["state"] == "wedged"
    assert cards["dark"]["engines"][0]["ranks"] == [["pp0", None], ["pp1", None]]
    assert cards["canary"]["role"] == "canary"


def test_engine(client: TestClient) -> None:
    """An engine by JSON has every field of its view."""
    body = client.get(ENGINE).json()
    assert body.keys() == set(EngineView.__dataclass_fields__)
    assert body["findings"][1]["step"] == 72
    assert body["ranks"][0]["in_flight_seconds"] == 94.2
    assert body["strip"]["rows"][0][1][-1]["guard"] == "none"


@pytest.mark.parametrize("make", views.ALL_VIEWS, ids=lambda make: make.__name__)
def test_every_view_travels(make) -> None:  # type: ignore[no-untyped-def]
    """Each view can be carried and is valid by its own schema."""
    wire = to_wire(make())
    assert wire_model(EngineView).model_validate_json(wire.model_dump_json()) == wire


def test_schema_names_the_states() -> None:
    """The schema lists the labels of states."""
    states = wire_model(FleetView).model_json_schema()["$defs"]["DeploymentCard"]["properties"]["state"]
    assert "rank lost" in states["enum"]


def test_series(client: TestClient, fake: FakeRankscope) -> None:
    """Drift per rank over time."""
    fake.draw(views.growing_series(views.NOW, seconds=10))
    body = client.get(f"{ENGINE}/series").json()
    assert body["labels"] == ["pp0", "pp1"]
    assert len(body["times_unix"]) == len(body["values"][0]) == 10


def test_audit(client: TestClient, fake: FakeRankscope) -> None:
    """What was done."""
    fake.rows = list(views.applied().audit)
    assert client.get("/api/v1/audit?limit=1").json()[0]["actor"] == "mira"


def test_plan(client: TestClient) -> None:
    """The text of the confirmation, without doing anything."""
    body = client.get(f"/api/v1/deployments/baseline/engines/{ENGINES['baseline']}/fix/plan?desired=true").json()
    assert body["effective_step"] == 432


def test_toggle(client: TestClient, fake: FakeRankscope) -> None:
    """A toggle is accepted with its generation and step."""
    answer = client.post(f"/api/v1/deployments/baseline/engines/{ENGINES['baseline']}/fix", json={"desired": True})
    assert (answer.status_code, answer.json()["generation"]) == (202, 4)
    assert fake.toggles == [("baseline", ENGINES["baseline"], True, "local")]
    assert client.post("/api/v1/deployments/baseline/fix", json={"desired": False}).status_code == 202


def test_refused_toggle(client: TestClient, fake: FakeRankscope) -> None:
    """A refusal is a conflict, with the reason."""
    fake.refusal = "no token"
    answer = client.post("/api/v1/deployments/baseline/fix", json={"desired": True})
    assert (answer.status_code, answer.json()["reason"]) == (409, "no token")


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/api/v1/deployments/nope/fix", {"desired": True}, 404),
        ("/api/v1/deployments/baseline/engines/nope/fix", {"desired": True}, 404),
        ("/api/v1/deployments/baseline/fix", {}, 422),
        ("/api/v1/deployments/baseline/fix", {"desired": True, "force": True}, 422),
    ],
)
def test_bad_toggles(path: str, body: dict[str, object], code: int, client: TestClient, fake: FakeRankscope) -> None:
    """A toggle of what is not there, or with a field that is not known, is answered in JSON and does nothing."""
    answer = client.post(path, json=body)
    assert answer.status_code == code
    assert answer.json()["detail"]
    assert fake.toggles == []


def test_missing_engine(client: TestClient) -> None:
    """An engine that is not there is said to be so, with the remedy."""
    answer = client.get("/api/v1/deployments/wedge/engines/nope")
    assert answer.status_code == 404
    assert "GET /api/v1/fleet" in answer.json()["detail"]


def test_description(client: TestClient) -> None:
    """The OpenAPI description has the API's addresses and no page."""
    paths = client.get("/api/v1/openapi.json").json()["paths"]
    assert set(paths) == {
        "/api/v1/fleet",
        "/api/v1/alerts",
        "/api/v1/audit",
        "/api/v1/incidents",
        "/api/v1/incidents/{incident}",
        "/api/v1/incidents/{incident}/captures/{number}.zip",
        "/api/v1/incidents/{incident}/export.json",
        "/api/v1/incidents/{incident}/trace.json",
        "/api/v1/deployments/{deployment}/fix",
        "/api/v1/deployments/{deployment}/engines/{engine}",
        "/api/v1/deployments/{deployment}/engines/{engine}/series",
        "/api/v1/deployments/{deployment}/engines/{engine}/fix",
        "/api/v1/deployments/{deployment}/engines/{engine}/fix/plan",
    }
