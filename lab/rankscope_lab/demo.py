"""
The dashboard with simulated ranks, for a machine without vLLM: `python -m rankscope_lab.demo`.

The simulation writes real flight files through the real recorder; exporters and server are the ones of production.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence

import httpx2

from rankscope_lab.environment import REPOSITORY
from rankscope_lab.processes import Child

START_SECONDS = 180.0
POLL_SECONDS = 0.1


class DemoError(RuntimeError):
    """
    A part of the demo did not start; the message has the end of its log.
    """


def build_parser() -> argparse.ArgumentParser:
    """
    The command line.
    """
    parser = argparse.ArgumentParser(
        prog="rankscope_lab.demo",
        description="The dashboard with two simulated deployments that drift apart: turn the trim fix on at one and watch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=8700, help="where the dashboard listens")
    parser.add_argument(
        "--hold", type=float, default=180.0, help="seconds of traffic before engines without the fix wedge"
    )
    parser.add_argument(
        "--restart-after", type=float, default=45.0, help="seconds after which a wedged engine is started again"
    )
    parser.add_argument("--open", action="store_true", help="open the dashboard in a browser")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run the demo until it is told to end; 0 then, 1 if a part of it fails.
    """
    options = build_parser().parse_args(arguments)
    directory = REPOSITORY / "var" / "demo"
    directory.mkdir(parents=True, exist_ok=True)
    targets = directory / "targets.yaml"
    targets.unlink(missing_ok=True)
    for log in directory.glob("*.log"):
        log.unlink()
    # A demo tells its story from the beginning: what was turned on in the last one is not wanted in this one.
    shutil.rmtree(directory / "server", ignore_errors=True)
    simulation = Child(
        (*_module("rankscope_exporter"), "simulate", "--hold", str(options.hold), "--restart-after", str(options.restart_after),
         "--targets-file", str(targets)),
        os.environ, directory / "simulation.log",
    )  # fmt: skip
    server = Child(
        (*_module("rankscope_server"), "serve", "--config", str(targets), "--port", str(options.port),
         "--data-dir", str(directory / "server"), *(["--open"] if options.open else [])),
        os.environ, directory / "server.log",
    )  # fmt: skip
    _on_signals(_interrupt)
    began = time.monotonic()
    try:
        _say("simulated engines: starting")
        simulation.start()
        _wait(targets.exists, simulation, "the simulation")
        _say("dashboard: starting")
        server.start()
        url = f"http://127.0.0.1:{options.port}"
        _wait(
            lambda: _answers(url), server, f"the dashboard on port {options.port} (is it taken? --port names another)"
        )
        _say(f"dashboard: {url}  (up after {time.monotonic() - began:.0f} s)")
        _say("Both deployments drift. Open `canary`, turn the trim fix on, and compare. Ctrl-C ends the demo.")
        while (ended := _ended((simulation, server))) is None:
            time.sleep(1.0)
        _say(f"a part of the demo ended by itself:\n{ended.log_tail()}")
    except DemoError as error:
        _say(str(error))
    except KeyboardInterrupt:
        return 0
    finally:
        _on_signals(signal.SIG_IGN)  # told twice, it ends as if told once
        for child in (server, simulation):
            child.stop()
        _say("ended, nothing is left running")
    return 1


def _module(name: str) -> tuple[str, str, str]:
    return sys.executable, "-m", name


def _ended(children: Sequence[Child]) -> Child | None:
    return next((child for child in children if child.exit_status() is not None), None)


def _wait(holds: Callable[[], bool], child: Child, what: str) -> None:
    until = time.monotonic() + START_SECONDS
    while not holds():
        if child.exit_status() is not None or time.monotonic() > until:
            msg = f"{what} did not start:\n{child.log_tail()}"
            raise DemoError(msg)
        time.sleep(POLL_SECONDS)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz", timeout=1.0).status_code == 200
    except httpx2.HTTPError:
        return False


def _on_signals(handler: Callable[..., None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
