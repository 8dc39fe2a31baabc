"""
`PUT /v1/control`: who may, when it is refused, and that every rank of the engine gets the word.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rankscope_exporter.contract import ControlOutcome, Mitigation, MitigationState
from rankscope_exporter.flight import layout
from rankscope_exporter.serve.app import MAX_BODY_BYTES, create_app
from rankscope_exporter.serve.settings import ServeSettings

Make = Callable[..., Any]
COMMAND = {"engine": "e1", "mitigation": "trim", "desired": True, "generation": 3, "effective_step": 40}


@pytest.fixture
def put(client: TestClient, token: str) -> Callable[..., Any]:
    """Sends a command with the right token; changes to it by keyword."""

    def send(**changes: Any) -> Any:
        return client.put("/v1/control", json=COMMAND | changes, headers={"authorization": f"Bearer {token}"})

    return send


def word(rank: Any) -> int:
    return int(rank.writer.words[layout.CONTROL_REQUEST])


def test_every_rank_gets_the_word(put: Make, rank_file: Make) -> None:
    """An accepted command stands in the file of every rank of the engine, and of no other."""
    ranks = [rank_file(0), rank_file(1)]
    other = rank_file(0, engine="e2")

    answer = put()

    assert answer.status_code == 200
    assert answer.json() == {"accepted": True, "reason": "", "ranks": [rank.key for rank in ranks]}
    assert [layout.decode_control(word(rank)) for rank in ranks] == [(Mitigation.TRIM, 3, 40, True)] * 2
    assert word(other) == 0


def test_ranks_answer_shows_what_was_asked_and_done(put: Make, rank_file: Make, client: TestClient) -> None:
    """What was asked for stands in `/v1/ranks` at once, what the rank did as soon as it has acted."""
    rank = rank_file(0)
    put()
    asked = client.get("/v1/ranks").json()["ranks"][0]
    assert asked["control"] | {"outcome": 0} == {
        "requested_generation": 3, "observed_generation": 0, "desired": True, "effective_step": 40, "acted_step": 0, "outcome": 0,
    }  # fmt: skip

    words = rank.writer.words
    words[layout.ACK_OBSERVED] = words[layout.ACK_WORD] = word(rank)
    words[layout.ACK_STEP], words[layout.ACK_OUTCOME], words[layout.ACK_STATE] = (
        40,
        ControlOutcome.APPLIED,
        MitigationState.APPLIED,
    )
    done = client.get("/v1/ranks").json()["ranks"][0]

    assert (done["control"]["acted_step"], done["control"]["outcome"]) == (40, ControlOutcome.APPLIED)
    assert done["mitigations"] == [{"mitigation": "trim", "state": MitigationState.APPLIED, "reason": ""}]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (MitigationState.UNKNOWN_CODE, "unknown code: two trims"),
        (MitigationState.NOT_APPLICABLE, "not applicable: two trims"),
    ],
)
def test_refused_unless_every_rank_can(put: Make, rank_file: Make, state: MitigationState, said: str) -> None:
    """One rank that cannot is enough to refuse, with its reason, and nothing is written."""
    able, unable = rank_file(0), rank_file(1)
    unable.mitigation(state, "two trims")

    answer = put()

    assert answer.status_code == 409
    assert not answer.json()["accepted"]
    assert f"rank dp0 pp1 tp0 reports 'trim' as {said}" in answer.json()["reason"]
    assert (word(able), word(unable)) == (0, 0)


def test_refused_without_a_report(put: Make, rank_file: Make) -> None:
    """A rank that does not report the mitigation at all is no rank that can."""
    rank_file(0).writer.write_report({"hooks": [], "mitigations": []})

    assert "does not report 'trim'" in put().json()["reason"]


def test_refused_for_a_rank_that_is_gone(put: Make, rank_file: Make) -> None:
    """All ranks must run."""
    rank_file(0)
    rank_file(1).gone()

    assert put().json()["reason"].startswith("rank dp0 pp1 tp0 is gone")


def test_file_of_an_earlier_process_is_no_obstacle(put: Make, rank_file: Make) -> None:
    """A rank that was started anew is what counts; the file that its first process left gets no word."""
    left = rank_file(0, key="a-left-behind")
    left.gone()
    now = rank_file(0)

    assert put().json()["ranks"] == [now.key]
    assert word(left) == 0


def test_unknown_engine(put: Make, rank_file: Make) -> None:
    """An engine that has no rank here is refused."""
    rank_file(0)

    answer = put(engine="e9")

    assert (answer.status_code, "'e9'" in answer.json()["reason"]) == (409, True)


@pytest.mark.parametrize(("generation", "status"), [(2, 409), (3, 200), (4, 200)])
def test_generations(put: Make, rank_file: Make, generation: int, status: int) -> None:
    """An older command is refused; the same one again is what a client without an answer sends, and is taken."""
    rank_file(0)
    assert put().status_code == 200

    assert put(generation=generation).status_code == status


def test_same_generation_other_content(put: Make, rank_file: Make) -> None:
    """A generation stands for one command only."""
    rank_file(0)
    put()

    assert put(desired=False).status_code == 409


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"generation": 0}, "generation"), ({"generation": layout.MAX_GENERATION + 1}, "generation"), ({"effective_step": -1}, "effective_step"),
        ({"effective_step": layout.MAX_EFFECTIVE_STEP + 1}, "effective_step"), ({"desired": "perhaps"}, "desired"), ({"extra": 1}, "extra"),
        ({"mitigation": "other"}, "known: trim"),
    ],
)  # fmt: skip
def test_bad_command(put: Make, rank_file: Make, changes: dict[str, Any], named: str) -> None:
    """A command that is wrong says which field is."""
    rank_file(0)

    answer = put(**changes)

    assert (answer.status_code, named in answer.text) == (400, True)


def test_no_json(client: TestClient, token: str) -> None:
    """A body that is no JSON is refused as such."""
    answer = client.put("/v1/control", content=b"{", headers={"authorization": f"Bearer {token}"})

    assert (answer.status_code, "JSON" in answer.text) == (400, True)


def test_long_body(client: TestClient, token: str) -> None:
    """A body that is far too long is not even parsed."""
    answer = client.put(
        "/v1/control", content=b" " * (MAX_BODY_BYTES + 1), headers={"authorization": f"Bearer {token}"}
    )

    assert answer.status_code == 413


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "Basic a-token-for-tests-only", "a-token-for-tests-only", "Bearer ü"]
)
def test_wrong_token(client: TestClient, rank_file: Make, header: str | None) -> None:
    """Without the token nothing is written, and the answer says how it is sent."""
    rank = rank_file(0)

    answer = client.put("/v1/control", json=COMMAND, headers={"authorization": header.encode()} if header else {})

    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert "Authorization: Bearer" in answer.text
    assert word(rank) == 0


def test_off_without_a_token(flight_dir: Path, rank_file: Make, serve_settings: ServeSettings) -> None:
    """Without a configured token control is off, whatever a client sends, and the answer says how to turn it on."""
    rank = rank_file(0)
    settings = serve_settings.model_copy(update={"control_token": None})
    with TestClient(create_app(settings), base_url="http://localhost") as client:
        answer = client.put("/v1/control", json=COMMAND, headers={"authorization": "Bearer None"})
        told = client.get("/v1/ranks").json()["control"]

    assert (answer.status_code, "--control-token-file" in answer.text) == (403, True)
    assert (word(rank), told) == (0, False)


def test_other_methods(client: TestClient) -> None:
    """Only PUT is taken: nothing that a link or a form in a browser can send."""
    assert {client.request(method, "/v1/control").status_code for method in ("GET", "POST", "DELETE")} == {405}
