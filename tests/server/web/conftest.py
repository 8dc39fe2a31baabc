"""
The web half over a fake, without a network.
"""

import asyncio
import difflib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_rankscope import ALL_VIEWS, FakeRankscope
from fake_reports import fill
from fastapi import FastAPI
from starlette.testclient import TestClient

from rankscope_server.web import install
from rankscope_server.web.assets import Assets
from rankscope_server.web.templating import Templates

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "templates"
STATIC = ROOT / "server" / "rankscope_server" / "static"


@pytest.fixture
def fake() -> FakeRankscope:
    """
    Every state there is.
    """
    shown = FakeRankscope(tuple(make() for make in ALL_VIEWS))
    fill(shown)
    return shown


@pytest.fixture
def app(fake: FakeRankscope) -> FastAPI:
    """
    An application as `create_app` makes it, as far as the web half is concerned.
    """
    application = FastAPI(docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json")
    install(application, fake, templates_dir=TEMPLATES, static_dir=STATIC)
    return application


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    """
    A browser without scripts.
    """
    with TestClient(app, raise_server_exceptions=False, follow_redirects=False) as opened:
        yield opened


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """
    Compares a text with the file of that name in `goldens/`, or writes it with --update-goldens.
    """
    folder = Path(__file__).parent / "goldens"

    def compare(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--update-goldens"):
            folder.mkdir(exist_ok=True)
            path.write_text(text)
        expected = path.read_text() if path.exists() else ""
        changes = difflib.unified_diff(expected.splitlines(True), text.splitlines(True), name, "now", n=1)
        if expected != text:
            pytest.fail(
                f"{name} has changed; if it should, use --update-goldens\n{''.join(changes)[:4000]}", pytrace=False
            )

    return compare


@pytest.fixture(scope="session")
def templates() -> Templates:
    """
    The templates as pages use them. They hold nothing that a test could change, and take a while to compile.
    """
    return Templates(TEMPLATES, Assets(STATIC))


@dataclass(frozen=True)
class Event:
    """
    A server-sent event.
    """

    name: str
    data: str

    def json(self) -> dict[str, object]:
        """
        Its data.
        """
        return dict(json.loads(self.data))


class EventReader:
    """
    Reads a stream event by event.
    """

    def __init__(self, chunks: asyncio.Queue[bytes | None]) -> None:
        self._chunks = chunks
        self._buffer = b""

    async def next(self, name: str | None = None) -> Event | None:
        """
        The next event (of that name); None once the stream has ended.
        """
        while True:
            while b"\n\n" not in self._buffer:
                chunk = await asyncio.wait_for(self._chunks.get(), 10)
                if chunk is None:
                    return None
                self._buffer += chunk
            raw, _, self._buffer = self._buffer.partition(b"\n\n")
            lines = raw.decode().split("\n")
            event = Event(
                next((line[7:] for line in lines if line.startswith("event: ")), ""),
                "\n".join(line[6:] for line in lines if line.startswith("data: ")),
            )
            if name is None or event.name == name:
                return event


@pytest.fixture
def follow(app: FastAPI) -> Callable[[str, Callable[[EventReader], Awaitable[None]]], None]:
    """
    Runs a function over an open stream.
    """

    @asynccontextmanager
    async def opened(path: str) -> AsyncIterator[EventReader]:
        chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        left = asyncio.Event()
        asked = False

        async def receive() -> dict[str, object]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body":
                await chunks.put(bytes(message.get("body", b"")))  # type: ignore[arg-type]
                if not message.get("more_body"):
                    await chunks.put(None)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
            "server": ("test", 80),
            "client": ("test", 1),
            "state": {},
        }
        task = asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]
        try:
            yield EventReader(chunks)
        finally:
            left.set()
            await asyncio.wait_for(task, 10)

    def run(path: str, body: Callable[[EventReader], Awaitable[None]]) -> None:
        async def main() -> None:
            async with opened(path) as reader:
                await body(reader)

        asyncio.run(main())

    return run
