"""
A real exporter process beside each simulated engine.

It runs what `rankscope-exporter serve` runs; it is forked, so that what has been imported once is there at once.
"""

import http.client
import multiprocessing
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

from rankscope_exporter.contract.http import HEALTH_PATH
from rankscope_exporter.simulation.lifeline import die_with_parent, leave_signals_to_parent

_FORK = multiprocessing.get_context("fork")


class ExporterError(Exception):
    """
    The exporter process does not serve; the message says what is known.
    """


@dataclass(frozen=True, slots=True)
class Exporter:
    """
    A running exporter process, on `port` of this machine.
    """

    process: ForkProcess
    port: int

    def wait_until_ready(self, host: str, seconds: float) -> None:
        """
        Return once it answers.

        Raises:
            ExporterError: it has ended, or does not answer in time.

        """
        probe = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  compared, not bound
        deadline = time.monotonic() + seconds
        while not _answers(probe, self.port):
            if self.process.exitcode is not None:
                raise ExporterError(
                    f"the exporter process on port {self.port} ended with status {self.process.exitcode}; its message is above"
                )
            if time.monotonic() > deadline:
                raise ExporterError(f"no answer from the exporter process on port {self.port} in {seconds:g} s")
            time.sleep(0.05)

    def end(self) -> None:
        """
        End the process, by force if it does not go by itself.
        """
        self.process.terminate()
        self.process.join(2)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


def _answers(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=1)
    try:
        connection.request("GET", HEALTH_PATH)
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def start_exporter(flight_dir: Path, token_file: Path, host: str, port: int) -> Exporter:
    """
    Start an exporter process for the flight files in `flight_dir`; port 0 takes one that is free.

    Raises:
        OSError: the address is not this machine's.

    """
    from rankscope_exporter.serve import server  # noqa: F401, PLC0415  imported here, shared by all

    if port == 0:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            port = free.getsockname()[1]
    settings = {
        "RANKSCOPE_FLIGHT_DIR": str(flight_dir),
        "RANKSCOPE_CONTROL_TOKEN_FILE": str(token_file),
        "RANKSCOPE_HOST": host,
        "RANKSCOPE_PORT": str(port),
    }
    process = _FORK.Process(target=_run_exporter, args=(settings, os.getpid()))
    process.start()
    return Exporter(process, port)


def _run_exporter(settings: Mapping[str, str], parent: int) -> None:
    die_with_parent(parent)
    leave_signals_to_parent()
    from rankscope_exporter.cli import main  # noqa: PLC0415  which imports this package in turn

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output is the simulation's own
    os.environ.pop("RANKSCOPE_CONTROL_TOKEN", None)  # the file is the one to hold
    os.environ.update(settings)
    raise SystemExit(main(["serve"]))


def make_token(path: Path) -> None:
    """
    Write a new control token that only this user can read.

    Raises:
        OSError: it cannot be written.

    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
