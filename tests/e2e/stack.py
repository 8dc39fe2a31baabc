"""
One real vLLM engine (PP=2), an exporter process and a server, as an operator would run them, for one run.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab"))

from figures import progress

from rankscope_lab import checkpoint
from rankscope_lab import environment as lab_environment
from rankscope_lab.engine import Engine, EngineOptions
from rankscope_lab.processes import Child, free_port

READY_SECONDS = 420.0
"""
A boot takes 15 to 30 s on a quiet machine; a machine that is not quiet is no failure.
"""


class Observers:
    """
    Exporter and server of a deployment called `name`, over a flight directory of its own; they end with the `with` block.

    `server_arguments` are further ones of `rankscope serve`.
    """

    def __init__(
        self, name: str, *, python: Path | None = None, role: str = "baseline", server_arguments: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.flight_dir = Path(tempfile.mkdtemp(prefix=f"rankscope-e2e-{name}-", dir="/dev/shm"))
        self.work = Path(tempfile.mkdtemp(prefix=f"rankscope-e2e-{name}-"))
        token = self.work / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe())
        exporter_port, server_port = free_port(), free_port()
        self.exporter_url = f"http://127.0.0.1:{exporter_port}"
        self.server_url = f"http://127.0.0.1:{server_port}"
        serve = (
            "serve",
            "--flight-dir",
            str(self.flight_dir),
            "--port",
            str(exporter_port),
            "--control-token-file",
            str(token),
        )
        python = python or lab_environment.default(os.environ).python
        self.exporter = self._child((str(python), "-m", "rankscope_exporter", *serve), "exporter.log")
        target = f"{name}={self.exporter_url},role={role},token-file={token}"
        dashboard = ("serve", "--target", target, "--port", str(server_port), "--data-dir", str(self.work / "data"))
        command = (sys.executable, "-m", "rankscope_server", *dashboard, *server_arguments)
        self.server = self._child(command, "server.log")
        self.http = httpx2.AsyncClient(timeout=5.0)

    def _child(self, command: tuple[str, ...], log: str) -> Child:
        return Child(command, os.environ, self.work / log)

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()
        await self._end()
        if error is not None:
            progress(f"{self.name}: failed; the end of the server's log:\n{self.server.log_tail()}")
        else:
            shutil.rmtree(self.work, ignore_errors=True)
        shutil.rmtree(self.flight_dir, ignore_errors=True)

    async def _begin(self) -> None:
        self.exporter.start()
        self.server.start()

    async def _end(self) -> None:
        for part in (self.server, self.exporter):
            await asyncio.to_thread(part.stop)

    async def get(self, path: str) -> Any:
        """
        A JSON answer of the server.
        """
        response = await self.http.get(self.server_url + path)
        response.raise_for_status()
        return response.json()

    async def view(self) -> Any:
        """
        The engine page's view of the newest engine.
        """
        fleet = await self.get("/api/v1/fleet")
        engine = fleet["deployments"][0]["engines"][0]["engine"]
        return await self.get(f"/api/v1/deployments/{self.name}/engines/{engine}")

    async def toggle(self, *, desired: bool) -> Any:
        """
        Turn the fix on or off through the server.
        """
        response = await self.http.post(
            f"{self.server_url}/api/v1/deployments/{self.name}/fix", json={"desired": desired}
        )
        return response.json()

    async def until(self, holds: Callable[[Any], Any], path: str, what: str, seconds: float = 30.0) -> Any:
        """
        The server's answer at `path` once it holds.

        Raises:
            TimeoutError: it did not within `seconds`.

        """
        end = time.monotonic() + seconds
        answer = None
        while time.monotonic() < end:
            with contextlib.suppress(httpx2.HTTPError):
                answer = await self.get(path)
                if holds(answer):
                    return answer
            await asyncio.sleep(0.1)
        msg = f"{what}: not within {seconds:.0f} s; last answer {str(answer)[:600]}"
        raise TimeoutError(msg)


class Stack(Observers):
    """
    The same with a real engine (PP=2) that they watch. Further arguments are the engine's options.
    """

    def __init__(
        self,
        name: str,
        *,
        role: str = "baseline",
        trim_fix: str = "off",
        server_arguments: tuple[str, ...] = (),
        **engine: Any,
    ) -> None:
        lab = lab_environment.default(os.environ)
        super().__init__(name, python=lab.python, role=role, server_arguments=server_arguments)
        checkpoints = checkpoint.ensure(ROOT / "var" / "lab" / "checkpoints", lab.python)
        options = EngineOptions(
            python=lab.python,
            checkpoints=checkpoints,
            name=name,
            environment={"RANKSCOPE_FLIGHT_DIR": str(self.flight_dir), "RANKSCOPE_TRIM_FIX": trim_fix},
            **engine,
        )
        self.engine = Engine(options, self.work / "engine.log")

    async def _begin(self) -> None:
        await super()._begin()
        self.engine.start()
        progress(f"{self.name}: starting vLLM, exporter and server (logs in {self.work})")
        took = await asyncio.to_thread(self.engine.wait_ready, READY_SECONDS, progress)
        await self.until(
            lambda fleet: fleet["deployments"][0]["engines"], "/api/v1/fleet", "the engine on the fleet page"
        )
        progress(f"{self.name}: ready after {took:.0f} s")

    async def _end(self) -> None:
        await asyncio.to_thread(self.engine.stop)
        await super()._end()
