"""
The exporter process's answers, over real flight files.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rankscope_exporter.contract import Phase, RanksAnswer, RequestsAnswer
from rankscope_exporter.flight.layout import MARGIN_UNKNOWN
from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.node import Clock, Node
from rankscope_exporter.serve.settings import ServeSettings

Make = Callable[..., Any]


def test_ranks(client: TestClient, rank_file: Make, flight_dir: Path) -> None:
    """Every rank is told of with its identity, life, hooks, mitigations, step and phase."""
    first, second = rank_file(0), rank_file(1)
    first.steps(7)
    second.steps(6)
    second.step(7, Phase.DECIDED)

    answer = RanksAnswer.model_validate_json(client.get("/v1/ranks").content)

    assert (answer.flight_dir, answer.control, answer.unreadable) == (str(flight_dir), True, [])
    assert [rank.identity for rank in answer.ranks] == [first.identity, second.identity]
    assert [(rank.key, rank.life.value, rank.step, rank.phase) for rank in answer.ranks] == [
        (first.key, "running", 7, Phase.DONE),
        (second.key, "running", 7, Phase.DECIDED),
    ]
    assert answer.ranks[0].in_flight_seconds is None
    assert answer.ranks[1].in_flight_seconds is not None
    assert [hook.hook for hook in answer.ranks[0].hooks] == ["update_states"]


def test_before_the_first_step(client: TestClient, rank_file: Make) -> None:
    """A rank without a step has no ages, rather than ages of zero."""
    rank_file(0)

    rank = client.get("/v1/ranks").json()["ranks"][0]

    assert (rank["step"], rank["phase"], rank["in_flight_seconds"], rank["last_activity_seconds"]) == (0, 0, None, None)


def test_wedged_and_gone(client: TestClient, rank_file: Make) -> None:
    """A rank that was killed in a step is still served, with the phase that it never left."""
    rank = rank_file(0)
    rank.steps(3)
    rank.step(4, Phase.DECIDED)
    rank.gone()

    report = client.get("/v1/ranks").json()["ranks"][0]

    assert (report["life"], report["step"], report["phase"]) == ("gone", 4, Phase.DECIDED)


def test_times_of_another_clock(rank_file: Make, flight_dir: Path) -> None:
    """Records later than the node's clock (a file from another machine) have an unknown age, not a negative one."""
    rank_file(0).step(1, Phase.DECIDED)

    node = Node(flight_dir, Clock(monotonic_ns=lambda: 1))

    assert node.ranks(control=False).ranks[0].in_flight_seconds is None


def test_requests(client: TestClient, rank_file: Make) -> None:
    """The requests that drift are told of, of one engine if that is asked for; an unknown margin is null."""
    rank_file(0).writer.write_requests(
        [(9, 4, 20, 17, 3, MARGIN_UNKNOWN, 1, 5, b"req-1"), (9, 5, 12, 10, 2, 6, 0, 5, b"req-2")], 40
    )
    rank_file(0, engine="e2")

    everything = RequestsAnswer.model_validate_json(client.get("/v1/requests").content)
    one = RequestsAnswer.model_validate_json(client.get("/v1/requests?engine=e1").content)

    assert [table.engine for table in everything.tables] == ["e1", "e2"]
    assert one.tables[0].drifting == 40
    assert one.tables[0].rows[0].model_dump() == {
        "request_id": "req-1", "state_length": 20, "scheduler_length": 17, "drift": 3, "masked": True, "margin": None, "first_drift_step": 4, "step": 9,
    }  # fmt: skip
    assert [row.margin for row in one.tables[0].rows] == [None, 6]


def test_unreadable(client: TestClient, rank_file: Make, flight_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be read is told of in each answer and logged once."""
    rank_file(0)
    (flight_dir / "broken.flight").write_bytes(b"x" * 10)

    answers = [client.get("/v1/ranks").json() for _ in range(3)]

    assert {answer["unreadable"][0]["path"] for answer in answers} == {str(flight_dir / "broken.flight")}
    assert {len(answer["ranks"]) for answer in answers} == {1}
    assert [record.levelname for record in caplog.records if "broken.flight" in record.message] == ["WARNING"]


def test_health(client: TestClient, rank_file: Make, flight_dir: Path) -> None:
    """Health counts ranks that are seen, readable and running."""
    rank_file(0)
    rank_file(1).gone()
    (flight_dir / "broken.flight").touch()

    answer = client.get("/healthz")

    assert answer.status_code == 200
    assert answer.json()["ranks"] == {"seen": 3, "readable": 2, "running": 1}


def test_landing_page(client: TestClient, rank_file: Make) -> None:
    """A browser finds links, and a policy that lets nothing run."""
    rank_file(0)

    answer = client.get("/")

    assert 'href="/metrics"' in answer.text
    assert "</code>: 1<" in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    "path", ["/v1/ranks?engine=e1", "/v1/requests?cursor=x", "/v1/steps?after=3", "/metrics?rank=0"]
)
def test_unknown_parameter(client: TestClient, path: str) -> None:
    """A query parameter that means nothing here is refused rather than overlooked."""
    answer = client.get(path)

    assert (answer.status_code, "unknown query parameter" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9610", 200), ("localhost:9610", 200), ("LOCALHOST", 200), ("[::1]:9610", 200), ("10.0.0.7", 200), ("exporter.internal:9610", 200),
        (os.uname().nodename, 200), ("attacker.example", 421), ("127.0.0.1.attacker.example", 421), ("", 421),
    ],
)  # fmt: skip
def test_host_header(serve_settings: ServeSettings, host: str, status: int) -> None:
    """Plain addresses, our own names and allowed ones are served; any other name could be a page that rebinds its own."""
    settings = serve_settings.model_copy(update={"allowed_hosts": "exporter.internal, other"})
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
        answer = client.get("/healthz", headers={"host": host})

    assert answer.status_code == status
    assert status == 200 or "RANKSCOPE_ALLOWED_HOSTS" in answer.text
