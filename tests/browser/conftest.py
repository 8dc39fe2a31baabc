"""
A real browser against the web half on a real server, with a fake behind it.
"""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from fake_rankscope import ALL_VIEWS, CSP, FakeRankscope, growing_series
from fake_reports import fill
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope_server.web import install

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "var" / "screenshots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class PolicyHeader:
    """
    The policy under which the real application serves.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", CSP.encode())]
            await send(message)

        await self._app(scope, receive, with_policy if scope["type"] == "http" else send)


@dataclass
class Site:
    """
    A running server and the fake behind it.
    """

    url: str
    fake: FakeRankscope


@pytest.fixture
def serve() -> Iterator[Callable[[FakeRankscope], Site]]:
    """
    Starts servers on free ports, and ends them.
    """
    running: list[tuple[uvicorn.Server, threading.Thread, FakeRankscope]] = []

    def start(fake: FakeRankscope) -> Site:
        app = FastAPI(
            docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json", middleware=[Middleware(PolicyHeader)]
        )
        install(app, fake, templates_dir=ROOT / "templates", static_dir=ROOT / "server" / "rankscope_server" / "static")
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread, fake))
        return Site(f"http://127.0.0.1:{listener.getsockname()[1]}", fake)

    yield start
    for server, thread, fake in running:
        fake.closing = True
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def site(serve: Callable[[FakeRankscope], Site]) -> Site:
    """
    Every state there is.
    """
    fake = FakeRankscope(tuple(make() for make in ALL_VIEWS), now=time.time())
    fake.draw(growing_series(fake.now))
    fill(fake)
    return serve(fake)


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    """
    The browser.
    """
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the browser tests need Playwright: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("the browser tests need Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"],
        )
        yield browser
        browser.close()


@dataclass
class Tab:
    """
    A page of the browser that writes down what it complains about.
    """

    page: object
    complaints: list[str] = field(default_factory=list)


@pytest.fixture
def open_tab(chromium) -> Iterator[Callable[..., object]]:  # type: ignore[no-untyped-def]
    """
    Opens pages; fails the test at its end if one of them wrote an error to the console or broke the policy.

    `complains` is for pages whose very point is an error: the browser logs each answer of 400 and above.
    """
    tabs: list[Tab] = []
    contexts = []

    def opened(width: int = 1280, height: int = 900, *, complains: bool = False, **options: object):  # type: ignore[no-untyped-def]
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()
        tab = Tab(page)
        page.on(
            "console",
            lambda message: tab.complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        page.add_init_script(
            "document.addEventListener('securitypolicyviolation', (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI}`));"
        )
        if not complains:
            tabs.append(tab)
        return page

    yield opened
    complaints = [complaint for tab in tabs for complaint in tab.complaints]
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Callable[[object, str], None]:
    """
    Keeps a screenshot of a page under `var/screenshots`.
    """

    def shoot(page, name: str, *, full_page: bool = True) -> None:  # type: ignore[no-untyped-def]
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=full_page)

    return shoot


@pytest.fixture
def contrast() -> str:
    """
    A function for the page, which lists the texts that do not stand out from their ground.
    """
    return CONTRAST


CONTRAST = """
() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (css) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => { const c = [r, g, b].map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] > 200) return c; } return [255, 255, 255, 255]; };
  const bad = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), e = walker.currentNode.parentElement;
    if (!text || !e.checkVisibility?.() || e.closest('svg, .visually-hidden, .skip-link, dialog, [aria-disabled], .u-legend')) continue;
    const a = light(rgba(getComputedStyle(e).color)), b = light(ground(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.add(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return [...bad];
}
"""
