"""Who may do what, and which pages may ask."""

from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rankscope_server.auth import checked_names, guard, own_names, password_line, read_passwords
from rankscope_server.settings import ConfigError

pytestmark = pytest.mark.anyio


async def who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(request.state.actor)


def client(passwords=None, names=frozenset({"127.0.0.1", "localhost"})):
    app = guard(Starlette(routes=[Route("/", who, methods=["GET", "POST"])]), names=names, passwords=passwords)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1:8700")


@pytest.fixture
def passwords(tmp_path: Path):
    path = tmp_path / "users"
    path.write_text(f"# users\n\n{password_line('ada', 'correct horse')}\n")
    path.chmod(0o600)
    return read_passwords(path)


async def test_without_passwords_everybody_is_local():
    """The machine's own user."""
    async with client() as c:
        assert (await c.get("/")).text == "local"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://127.0.0.1:8700"}, 200),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_pages_of_other_origins_may_not_post(headers, status):
    """Browsers say where a request comes from; other clients say nothing and pass."""
    async with client() as c:
        assert (await c.post("/", headers=headers)).status_code == status
        assert (await c.get("/", headers=headers)).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8700", "", "127.0.0.1.evil.example"])
async def test_foreign_names_are_refused(host):
    """A name that was pointed at this machine after its page was loaded."""
    async with client() as c:
        response = await c.get("/", headers={"host": host})
        assert response.status_code == 421
        assert "--allowed-host" in response.text


async def test_every_response_has_the_security_headers():
    """Refusals, too."""
    async with client() as c:
        for response in (await c.get("/"), await c.get("/nowhere"), await c.get("/", headers={"host": "evil"})):
            assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
            assert "unsafe" not in response.headers["content-security-policy"]
            assert response.headers["x-content-type-options"] == "nosniff"


async def test_with_passwords_everything_asks(passwords):
    """The right one is let in under its name; wrong, unknown and damaged ones are not."""
    async with client(passwords) as c:
        response = await c.get("/")
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith("Basic")
        assert (await c.get("/nowhere")).status_code == 401
        for _ in range(2):
            assert (await c.get("/", auth=("ada", "correct horse"))).text == "ada"
        for user, password in [("ada", "wrong"), ("eve", "correct horse"), ("", ""), ("ada", "")]:
            assert (await c.get("/", auth=(user, password))).status_code == 401
        for header in ["Basic !!!", "Basic", "Bearer x", "Basic /w=="]:
            assert (await c.get("/", headers={"authorization": header})).status_code == 401


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is empty"), ("# nobody\n", "holds no user"), ("ada:secret\n", "line 1: not `user:hash`"), ("x\n", "line 1")],
)
def test_a_password_file_that_is_none_is_refused(tmp_path: Path, text, words):
    """With the line and the remedy; a password in clear is none."""
    path = tmp_path / "users"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=words):
        read_passwords(path)


@pytest.mark.parametrize(
    ("user", "password"), [("a:b", "long enough"), ("", "long enough"), ("a b", "long enough"), ("ada", "short")]
)
def test_a_user_that_cannot_be_is_refused(user, password):
    """Names that the file could not hold, passwords that are too short."""
    with pytest.raises(ConfigError):
        password_line(user, password)


def test_names_are_checked_unless_a_password_guards_other_binds(passwords):
    """The server cannot know by which of its names other machines call it."""
    assert checked_names("127.0.0.1", (), None) == own_names("127.0.0.1", ())
    assert checked_names("127.0.0.1", ("proxy.example",), passwords) >= {"proxy.example", "localhost"}
    assert checked_names("0.0.0.0", (), passwords) is None
    assert checked_names("0.0.0.0", ("dash.example",), passwords) >= {"dash.example"}
