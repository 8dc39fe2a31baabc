"""
Tokens: what each opens, how they are compared, and that new ones are taken.
"""

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from rankscope_exporter.serve import tokens as module
from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.settings import ServeSettings, SettingsError
from rankscope_exporter.serve.tokens import (
    Caller,
    Tokens,
    assess_access,
    assess_caller,
    digest_of,
    read_tokens,
    renewed_tokens,
)

Make = Callable[..., Any]
READ, CONTROL = "the-read-token-of-tests", "the-control-token-of-tests"
BOTH = Tokens(digest_of(READ), digest_of(CONTROL))
COMMAND = {"engine": "e1", "desired": True, "generation": 3, "effective_step": 40}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


@pytest.fixture
def client(serve_settings: ServeSettings) -> Any:
    """A client of an exporter with both tokens."""
    settings = ServeSettings(flight_dir=serve_settings.flight_dir, read_token=READ, control_token=CONTROL)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:9610") as made:
        yield made


@pytest.mark.parametrize("path", ["/metrics", "/v1/ranks", "/v1/requests", "/v1/steps", "/nothing-here"])
@pytest.mark.parametrize(("token", "opens"), [("", False), ("wrong", False), (READ, True), (CONTROL, True)])
def test_reading(client: TestClient, rank_file: Make, path: str, token: str, opens: bool) -> None:
    """With a read token every answer takes it, or the control token; also for paths that there are not."""
    rank_file(0).steps(2)

    answer = client.get(path, headers=bearer(token))

    assert (answer.status_code == 401) is not opens
    if not opens:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "read token as `Authorization: Bearer TOKEN`" in answer.text
        assert "e1" not in answer.text


@pytest.mark.parametrize(("token", "status"), [("", 401), ("wrong", 401), (READ, 403), (CONTROL, 200)])
def test_control(client: TestClient, rank_file: Make, token: str, status: int) -> None:
    """Only the control token controls; the read token is told that it is the wrong one."""
    rank_file(0)

    answer = client.put("/v1/control", json=COMMAND, headers=bearer(token))

    assert answer.status_code == status
    assert (token == READ) is ("this is the read token" in answer.text)


@pytest.mark.parametrize("token", ["", "wrong"])
def test_landing_page_tells_nothing(client: TestClient, rank_file: Make, token: str, flight_dir: Path) -> None:
    """Without the token the landing page is there, and says nothing of ranks or files."""
    rank_file(0)

    closed, opened = client.get("/", headers=bearer(token)), client.get("/", headers=bearer(READ))

    assert (closed.status_code, opened.status_code) == (200, 200)
    assert str(flight_dir) not in closed.text
    assert "Ranks in" not in closed.text
    assert f"Ranks in <code>{flight_dir}</code>: 1" in opened.text


def test_health_is_for_everybody(client: TestClient, rank_file: Make, flight_dir: Path) -> None:
    """Health answers without a token, with counts and without names of files."""
    rank_file(0)
    (flight_dir / "broken.flight").touch()

    closed, opened = client.get("/healthz"), client.get("/healthz", headers=bearer(READ))

    assert closed.json() == {"status": "ok", "ranks": {"seen": 2, "readable": 1, "running": 1}}
    assert opened.json()["unreadable"][0]["path"].endswith("broken.flight")


def test_without_a_read_token_reading_is_open(serve_settings: ServeSettings, rank_file: Make) -> None:
    """As long as no read token is set, an `Authorization` header is neither needed nor looked at."""
    rank_file(0)
    with TestClient(create_app(serve_settings), base_url="http://127.0.0.1") as client:
        assert [client.get("/metrics", headers=bearer("wrong")).status_code for _ in range(30)] == [200] * 30


@given(given_token=st.text(max_size=40), scheme=st.sampled_from(["Bearer", "bearer", "Basic", ""]))
def test_any_header(given_token: str, scheme: str) -> None:
    """Whatever stands in the header, only the tokens themselves open anything."""
    caller = assess_caller(f"{scheme} {given_token}", BOTH)

    stripped = given_token.strip()
    known = {READ: Caller.READER, CONTROL: Caller.CONTROLLER} if scheme.lower() == "bearer" else {}
    assert caller is known.get(stripped, Caller.UNKNOWN)


@pytest.mark.parametrize("tokens", [BOTH, Tokens(), Tokens(read=BOTH.read), Tokens(control=BOTH.control)])
@pytest.mark.parametrize("given_token", [READ, CONTROL, "wrong", "x" * 1000])
def test_both_comparisons_are_always_made(tokens: Tokens, given_token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two comparisons in constant time over digests of one length, whichever token is given: no early end."""
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    assess_caller(f"Bearer {given_token}", tokens)

    assert compared == [(32, 32)] * 2


@pytest.mark.parametrize("caller", list(Caller))
def test_control_is_off_without_a_token(caller: Caller) -> None:
    """Nobody controls an exporter that has no control token."""
    refusal = assess_access("PUT", "/v1/control", caller, Tokens(read=BOTH.read))
    assert refusal is not None
    assert refusal.status == 403
    assert "--control-token-file" in refusal.detail


def test_same_token_twice(serve_settings: ServeSettings) -> None:
    """One value for both is refused at start: whoever may read could control."""
    with pytest.raises(SettingsError, match="are the same"):
        read_tokens(ServeSettings(read_token=READ, control_token=READ))


@pytest.mark.parametrize("text", ["", "short", "with a space in between"])
def test_weak_read_token(serve_settings: ServeSettings, text: str, tmp_path: Path) -> None:
    """A read token has to be as good as a control token."""
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match="a read token has at least 16"):
        read_tokens(ServeSettings(read_token_file=path))


def test_tokens_do_not_print() -> None:
    """Neither a token nor its digest appears where tokens are printed."""
    assert repr(BOTH) == "Tokens()"


def test_new_tokens_are_taken(serve_settings: ServeSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that was replaced is read; one that cannot be used changes nothing, is told of once, and tried again."""
    path = tmp_path / "token"

    def write(text: str) -> None:
        made = path.with_suffix(".new")
        made.write_text(text)
        made.chmod(0o600)
        made.replace(path)

    write(READ)
    tokens = renewed_tokens(ServeSettings(read_token_file=path))
    assert assess_caller(f"Bearer {READ}", tokens.value) is Caller.READER

    write("short")
    tokens.refresh()
    tokens.refresh()
    assert "has at least 16" in tokens.problem
    assert assess_caller(f"Bearer {READ}", tokens.value) is Caller.READER
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1

    write(CONTROL)
    tokens.refresh()
    assert tokens.problem == ""
    assert assess_caller(f"Bearer {CONTROL}", tokens.value) is Caller.READER
    assert assess_caller(f"Bearer {READ}", tokens.value) is Caller.UNKNOWN


def test_unread_tokens_show_in_health(serve_settings: ServeSettings, tmp_path: Path) -> None:
    """While new tokens cannot be read, health says so."""
    path = tmp_path / "token"
    path.write_text(READ)
    path.chmod(0o600)
    app = create_app(ServeSettings(flight_dir=serve_settings.flight_dir, read_token_file=path))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        path.unlink()
        app.state.tokens.refresh()
        told = client.get("/healthz", headers=bearer(READ)).json()

    assert told["status"] == "degraded"
    assert told["problems"] == [
        f"{path}: cannot read the read token: No such file or directory; what was read before stays in use"
    ]
