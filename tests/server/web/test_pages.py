"""
Pages and the toggle without scripts.
"""

import re

import fake_rankscope as views
import pytest
from fake_rankscope import ENGINES, FakeRankscope
from fastapi import FastAPI
from starlette.testclient import TestClient

BASELINE = f"/deployments/baseline/engines/{ENGINES['baseline']}"


def test_fleet_shows_every_state(client: TestClient) -> None:
    """The fleet page names each deployment and its state."""
    html = client.get("/").text
    for make in views.ALL_VIEWS:
        view = make()
        assert f">{view.state.label}<" in html
        assert view.deployment in html


def test_empty_fleet_tells_how_to_add_a_target(client: TestClient, fake: FakeRankscope) -> None:
    """An empty fleet shows the command that fills it."""
    for make in views.ALL_VIEWS:
        fake.forget(make())
    assert "rankscope serve --target baseline=http://node:9610" in client.get("/").text


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_engine_page(name: str, client: TestClient) -> None:
    """Each engine has its page."""
    answer = client.get(f"/deployments/{name}/engines/{ENGINES[name]}")
    assert answer.status_code == 200
    assert f"<title>{name} " in answer.text


def test_pages_hold_under_the_strictest_policy(client: TestClient) -> None:
    """No inline script, no style attribute, nothing from elsewhere."""
    for path in ("/", BASELINE, "/audit", "/api", "/nope", f"{BASELINE}/fix?desired=on"):
        html = client.get(path).text
        assert not re.search(r"<script(?![^>]*\ssrc=)", html)
        assert " style=" not in html
        assert not re.search(r'(?:src|href)="(?:https?:)?//', html)


def test_ids_are_unique(client: TestClient) -> None:
    """No page has an id twice."""
    for path in ("/", BASELINE, "/audit", "/api", f"{BASELINE}/fix?desired=on"):
        ids = re.findall(r'\sid="([^"]+)"', client.get(path).text)
        assert len(ids) == len(set(ids)), path


def test_nonce_is_fresh(client: TestClient) -> None:
    """Each page has a nonce of its own, which its stream element carries."""
    nonces = [re.findall(r'nonce="([^"]+)"', client.get("/").text) for _ in range(2)]
    assert all(len(set(found)) == 1 for found in nonces)
    assert nonces[0][0] != nonces[1][0]


def test_static_files_are_named_by_content(client: TestClient) -> None:
    """What a page refers to exists, and may be kept."""
    for url in re.findall(r'(?:src|href)="(/static/[^"]+)"', client.get(BASELINE).text):
        answer = client.get(url)
        assert answer.status_code == 200, url
        assert "immutable" in answer.headers["Cache-Control"]
    assert client.get("/static/css/base.css").headers["Cache-Control"] == "no-cache"


def test_audit(client: TestClient, fake: FakeRankscope) -> None:
    """The audit page shows who did what."""
    fake.rows = []
    assert "Nothing yet" in client.get("/audit").text
    fake.rows = list(views.applied().audit)
    assert "mira" in client.get("/audit").text


def test_api_page_lists_operations(client: TestClient) -> None:
    """The API page lists each operation of the API, and no page."""
    html = client.get("/api").text
    assert html.count('class="panel operation"') == 13
    assert "POST" in html


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("/nope", 404, "There is nothing at /nope."),
        ("/deployments/baseline/engines/gone", 404, "No engine gone of a deployment baseline is known."),
        ("/deployments/nope/fix?desired=on", 404, "No deployment nope is known."),
        (f"{BASELINE}/fix?desired=maybe", 422, "desired: "),
    ],
)
def test_errors_are_pages_with_a_remedy(path: str, code: int, said: str, client: TestClient) -> None:
    """An error says what is wrong and what to do."""
    answer = client.get(path)
    assert answer.status_code == code
    assert said in answer.text
    assert "To the fleet" in answer.text


def test_crash_is_a_page(client: TestClient, fake: FakeRankscope) -> None:
    """An error of ours is a page too, and tells nothing of the inside."""

    def fleet() -> None:
        raise RuntimeError("secret")

    fake.fleet = fleet  # type: ignore[method-assign, assignment]
    answer = client.get("/")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "server&#39;s log" in answer.text


def test_confirmation_says_what_will_happen(client: TestClient) -> None:
    """The confirmation tells ranks, step, change and limits, and does nothing."""
    html = client.get(f"{BASELINE}/fix?desired=on").text
    for said in (
        "pp0, pp1",
        "about step 432",
        "drift ends at that step",
        "does not revive a wedged engine",
        'id="confirm-go"',
    ):
        assert said in html


def test_toggle_without_scripts(client: TestClient, fake: FakeRankscope) -> None:
    """A plain form turns the fix on, and leads back to where progress is shown."""
    answer = client.post(f"{BASELINE}/fix", data={"desired": "on"})
    assert (answer.status_code, answer.headers["Location"]) == (303, f"{BASELINE}#fix")
    assert fake.toggles == [("baseline", ENGINES["baseline"], True, "local")]
    html = client.get(BASELINE).text
    assert "Pending: 0 of 2 ranks have acted; they act at step 432." in html


def test_toggle_of_a_deployment(client: TestClient, fake: FakeRankscope) -> None:
    """A whole deployment can be toggled; with one engine it leads to that engine."""
    answer = client.post("/deployments/baseline/fix", data={"desired": "off"})
    assert answer.headers["Location"] == f"{BASELINE}#fix"
    assert fake.toggles == [("baseline", None, False, "local")]


def test_refused_toggle(client: TestClient, fake: FakeRankscope) -> None:
    """A toggle that is refused says why, with a status that says so."""
    fake.refusal = "pp1 is stopped: a toggle needs every rank"
    answer = client.post(f"{BASELINE}/fix", data={"desired": "on"})
    assert answer.status_code == 409
    assert "pp1 is stopped: a toggle needs every rank." in answer.text
    assert 'id="confirm-go"' not in answer.text


def test_partly_sent_toggle(client: TestClient, fake: FakeRankscope) -> None:
    """An exporter that did not take the command is named."""
    fake.unsent = ("http://node-b:9610: timed out",)
    answer = client.post(f"{BASELINE}/fix", data={"desired": "on"})
    assert answer.status_code == 200
    assert "http://node-b:9610: timed out" in answer.text


def test_toggle_by_script(client: TestClient, fake: FakeRankscope) -> None:
    """The page's script gets a fragment to ask with, and an event when it is done."""
    asked = client.get(f"{BASELINE}/fix?desired=on", headers={"HX-Request": "true"})
    assert "<html" not in asked.text
    done = client.post(f"{BASELINE}/fix", data={"desired": "on"}, headers={"HX-Request": "true"})
    assert done.status_code == 204
    assert "rankscope:toggled" in done.headers["HX-Trigger"]


def test_disabled_button_says_why(client: TestClient) -> None:
    """Where the fix cannot be toggled the button is there, disabled, and described by the reason."""
    html = client.get(f"/deployments/wedge/engines/{ENGINES['wedge']}").text
    button = re.search(r'<button id="fix-turn-on"[^>]*>', html)
    assert button is not None
    assert 'aria-disabled="true"' in button.group()
    assert 'aria-describedby="fix-refusal"' in button.group()
    assert 'id="fix-refusal"' in html


def test_actor_is_who_signed_in(app: FastAPI, fake: FakeRankscope) -> None:
    """The name that the application left on the request is the actor."""

    @app.middleware("http")
    async def sign_in(request, call_next):  # type: ignore[no-untyped-def]
        request.state.actor = "mira"
        return await call_next(request)

    with TestClient(app, follow_redirects=False) as client:
        client.post(f"{BASELINE}/fix", data={"desired": "on"})
    assert fake.toggles[0][3] == "mira"
