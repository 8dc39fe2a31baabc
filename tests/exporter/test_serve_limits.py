"""
What is refused before anything is read.
"""

from typing import Any

import pytest
from starlette.testclient import TestClient

from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.limits import MAX_HEAD_BYTES
from rankscope_exporter.serve.node import Clock
from rankscope_exporter.serve.settings import ServeSettings

READ = "the-read-token-of-tests"


class TurnedClock:
    """A clock that only tests turn."""

    def __init__(self) -> None:
        self.seconds = 500.0

    def clock(self) -> Clock:
        return Clock(monotonic_ns=lambda: int(self.seconds * 1e9))


@pytest.fixture
def turned() -> TurnedClock:
    """A clock that only tests turn."""
    return TurnedClock()


def client_of(settings: ServeSettings, turned: TurnedClock, **changes: Any) -> TestClient:
    app = create_app(settings.model_copy(update=changes), clock=turned.clock())
    return TestClient(app, base_url="http://127.0.0.1")


def test_request_rate(serve_settings: ServeSettings, turned: TurnedClock) -> None:
    """One request too many is answered with 429 and the time to wait, after which requests pass again."""
    with client_of(serve_settings, turned, request_rate=0.5, request_burst=3) as client:
        assert [client.get("/metrics").status_code for _ in range(4)] == [200, 200, 200, 429]
        refused = client.get("/v1/ranks")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert "RANKSCOPE_REQUEST_RATE" in refused.text

        turned.seconds += 2.0

        assert [client.get("/metrics").status_code for _ in range(2)] == [200, 429]


def test_probe_has_its_own_rate(serve_settings: ServeSettings, turned: TurnedClock) -> None:
    """Health answers also where a client at the same address has used up its rate, and is limited itself."""
    with client_of(serve_settings, turned, request_burst=2) as client:
        assert [client.get("/metrics").status_code for _ in range(3)] == [200, 200, 429]
        assert [client.get("/healthz").status_code for _ in range(3)] == [200, 200, 429]


def test_rate_off(serve_settings: ServeSettings, turned: TurnedClock) -> None:
    """A rate of 0 limits nobody."""
    with client_of(serve_settings, turned, request_rate=0.0, request_burst=1) as client:
        assert {client.get("/metrics").status_code for _ in range(150)} == {200}


def test_forwarded_addresses_are_not_believed(serve_settings: ServeSettings, turned: TurnedClock) -> None:
    """A client cannot take another address by a header."""
    with client_of(serve_settings, turned, request_burst=1) as client:
        statuses = [client.get("/metrics", headers={"x-forwarded-for": f"10.0.0.{n}"}).status_code for n in range(3)]
    assert statuses == [200, 429, 429]


def test_wrong_tokens(serve_settings: ServeSettings, turned: TurnedClock, caplog: pytest.LogCaptureFixture) -> None:
    """After some wrong tokens even the right one is not looked at until the time has passed; health goes on without it."""
    settings = {"read_token": READ, "failure_rate": 0.5, "failure_burst": 3}
    settings = ServeSettings(flight_dir=serve_settings.flight_dir, **settings)
    right, wrong = {"authorization": f"Bearer {READ}"}, {"authorization": "Bearer wrong"}
    with client_of(settings, turned) as client:
        assert client.get("/metrics", headers=right).status_code == 200
        assert [client.get("/metrics", headers=wrong).status_code for _ in range(5)] == [401, 401, 401, 429, 429]
        refused = client.get("/metrics", headers=right)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert client.get("/metrics").status_code == 401
        assert "unreadable" not in client.get("/healthz", headers=right).json()

        turned.seconds += 2.0

        assert client.get("/metrics", headers=right).status_code == 200
        assert "unreadable" in client.get("/healthz", headers=right).json()
    assert len([record for record in caplog.records if "wrong token from" in record.message]) == 3
    assert READ not in caplog.text


def test_forgotten_token_is_no_guess(serve_settings: ServeSettings, turned: TurnedClock) -> None:
    """A client that brings no token at all tries none, and is not slowed down for it."""
    settings = ServeSettings(flight_dir=serve_settings.flight_dir, read_token=READ, failure_burst=1)
    with client_of(settings, turned) as client:
        assert {client.get("/metrics").status_code for _ in range(20)} == {401}
        assert client.get("/metrics", headers={"authorization": f"Bearer {READ}"}).status_code == 200


@pytest.mark.parametrize(("extra", "status"), [(1000, 400), (6000, 431)])
def test_long_head(serve_settings: ServeSettings, turned: TurnedClock, extra: int, status: int) -> None:
    """Path, query and headers that are longer together than any cursor needs are refused for that."""
    with client_of(serve_settings, turned) as client:
        path, headers = f"/v1/steps?cursor={'x' * (MAX_HEAD_BYTES - 4000)}", {"x-filler": "x" * extra}
        assert client.get(path, headers=headers).status_code == status
