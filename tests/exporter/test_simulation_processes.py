"""
The simulation as it is run: engines, ranks and exporter processes of its own.
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from rankscope_exporter.contract.words import Guard, MitigationState, Phase
from rankscope_exporter.flight import FlightFile, list_flight_files

pytestmark = pytest.mark.integration

PATIENCE = 60.0
"""
Seconds that a test waits for something that takes one or two on a quiet machine.
"""

FAST = ("--rate", "100", "--hold", "0.5", "--lull", "60")


def _read(stream: IO[str] | None) -> "queue.Queue[str]":
    """Lines of a stream as they come, and an empty one at its end."""
    lines: queue.Queue[str] = queue.Queue()

    def pump() -> None:
        assert stream is not None
        with stream:
            for line in stream:
                lines.put(line)
        lines.put("")

    threading.Thread(target=pump, daemon=True).start()
    return lines


class Simulation:
    """
    A running `simulate`, with what it says; every process of it carries a mark in its environment.
    """

    def __init__(self, directory: Path, argv: tuple[str, ...]) -> None:
        self.directory = directory
        self.mark = f"RANKSCOPE_TEST_MARK={uuid.uuid4().hex}"
        code = "import sys; from rankscope_exporter.simulation.cli import main; sys.exit(main(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "--dir", str(directory), *argv],
            env=os.environ | dict([self.mark.split("=")]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said, self.told = _read(self.process.stdout), _read(self.process.stderr)

    def read_until(self, lines: "queue.Queue[str]", *wanted: str) -> list[str]:
        """The lines up to the one in which the last of `wanted` was seen; fails if the stream ends before."""
        missing, read = list(wanted), []
        while missing:
            line = lines.get(timeout=PATIENCE)
            assert line, f"never said {missing}, but: {read}"
            read.append(line)
            missing = [text for text in missing if text not in line]
        return read

    def wait_until_up(self, engines: int = 2) -> list[dict[str, Any]]:
        """The deployments, once the simulation has told them."""
        lines = self.read_until(self.said, "control_token_file")
        while sum("control_token_file" in line for line in lines) < engines:
            lines += self.read_until(self.said, "control_token_file")
        deployments: list[dict[str, Any]] = yaml.safe_load("".join(lines))["deployments"]
        return deployments

    def pids(self) -> list[int]:
        """The processes that carry the mark and are not only waiting to be reaped."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def wait_until_gone(self, pids: list[int]) -> None:
        """Return once none of these processes runs."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                try:
                    assert select.select([descriptor], [], [], PATIENCE)[0], f"process {pid} is left behind"
                finally:
                    os.close(descriptor)

    def flights(self, name: str) -> list[Path]:
        """Flight files of a deployment, in order of rank."""
        return list(list_flight_files(self.directory / name / "flight"))


@pytest.fixture
def simulate(tmp_path: Path) -> Iterator[Callable[..., Simulation]]:
    running: list[Simulation] = []

    def start(*argv: str) -> Simulation:
        running.append(Simulation(tmp_path / str(len(running)), argv))
        return running[-1]

    yield start
    for simulation in running:
        for pid in simulation.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        simulation.process.wait()
        for lines in (simulation.said, simulation.told):
            while lines.get(timeout=PATIENCE):
                pass


def test_wedge_shows_who_did_what_last(simulate: Callable[..., Simulation]) -> None:
    """The last rank posted its broadcast and never left it; the first one skipped it and hangs in the next step."""
    simulation = simulate(*FAST, "--no-exporters", "--deployment", "name=one")
    simulation.read_until(simulation.told, "stuck for")
    first, last = simulation.flights("one")
    with FlightFile(first) as file:
        skipped, begun = file.records()[-2:]
    with FlightFile(last) as file:
        posted = file.records()[-1]
        assert posted["drift_max"] == 0
    assert (posted["phase"], posted["guard"]) == (Phase.DECIDED, Guard.BROADCAST)
    assert (skipped["step"], skipped["phase"], skipped["guard"]) == (posted["step"], Phase.DONE, Guard.SKIP)
    assert (begun["step"], begun["phase"]) == (posted["step"] + 1, Phase.STATE_UPDATED)


def test_engine_with_the_fix_outlives_the_one_without(simulate: Callable[..., Simulation]) -> None:
    """Two engines under the same traffic: the one without the fix wedges, the one with it takes many more steps."""
    simulation = simulate(*FAST, "--no-exporters", "--deployment", "name=off", "--deployment", "name=on,fix=on")
    simulation.read_until(simulation.told, "off: stuck for")
    steps = {}
    for name in ("off", "on"):
        with FlightFile(simulation.flights(name)[0]) as file:
            steps[name] = file.step()
            assert file.control().mitigation_state == (
                MitigationState.APPLIED if name == "on" else MitigationState.AVAILABLE
            )
    assert steps["on"] > steps["off"] + 20


def test_wedged_engine_is_restarted_under_another_name(simulate: Callable[..., Simulation]) -> None:
    """With `--restart-after` a wedged engine comes back with new ranks; the old flight files stay to be read."""
    simulation = simulate(*FAST, "--no-exporters", "--deployment", "name=one", "--restart-after", "0.5")
    simulation.read_until(simulation.told, "is up", "stuck for", "no rank came back")
    simulation.read_until(simulation.told, "is up")
    engines = []
    for path in simulation.flights("one"):
        with FlightFile(path) as file:
            engines.append(file.identity()["engine"])
    assert len(engines) == 4
    assert len(set(engines)) == 2


def test_killed_rank_leaves_its_peer_waiting(simulate: Callable[..., Simulation]) -> None:
    """After kill -9 of the first rank the engine stands still, and the other rank's process stays."""
    simulation = simulate("--no-exporters", "--deployment", "name=one")
    simulation.read_until(simulation.told, "is up")
    with FlightFile(simulation.flights("one")[0]) as first, FlightFile(simulation.flights("one")[1]) as last:
        os.kill(first.pid, signal.SIGKILL)
        simulation.read_until(simulation.told, "a rank's process is gone")
        os.kill(last.pid, 0)
    assert simulation.process.poll() is None


def test_exporters_serve_the_ranks_and_their_control_tokens_are_private(simulate: Callable[..., Simulation]) -> None:
    """Each deployment's exporter shows both ranks, control is on, and only this user can read the token."""
    simulation = simulate("--hold", "60")
    for deployment, name in zip(simulation.wait_until_up(), ("baseline", "canary"), strict=True):
        assert (deployment["name"], deployment["role"]) == (name, name)
        assert Path(deployment["control_token_file"]).stat().st_mode & 0o777 == 0o600
        with urllib.request.urlopen(f"{deployment['exporters'][0]}/v1/ranks", timeout=PATIENCE) as answer:
            ranks = json.load(answer)
        assert ranks["control"] is True
        assert [rank["identity"]["pp_rank"] for rank in ranks["ranks"]] == [0, 1]
        assert {rank["identity"]["model"] for rank in ranks["ranks"]} == {"simulated (k=3)"}
        assert {rank["mitigations"][0]["state"] for rank in ranks["ranks"]} == {int(MitigationState.AVAILABLE)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ends_with_all_its_processes(simulate: Callable[..., Simulation], number: signal.Signals) -> None:
    """SIGINT and SIGTERM end engines, ranks and exporter processes, wedged or not, with status 0."""
    simulation = simulate(*FAST, "--deployment", "name=off", "--deployment", "name=on,fix=on")
    simulation.wait_until_up()
    simulation.read_until(simulation.told, "off: stuck for")
    pids = simulation.pids()
    assert len(pids) == 9
    simulation.process.send_signal(number)
    assert simulation.process.wait(PATIENCE) == 0
    simulation.wait_until_gone(pids)


def test_nothing_is_left_when_it_is_killed(simulate: Callable[..., Simulation]) -> None:
    """After kill -9 of the simulation, wedged ranks and exporter processes end too."""
    simulation = simulate(*FAST, "--deployment", "name=off")
    simulation.wait_until_up(1)
    simulation.read_until(simulation.told, "off: stuck for")
    pids = simulation.pids()
    assert len(pids) == 5
    simulation.process.kill()
    simulation.wait_until_gone(pids)


def test_engine_that_cannot_be_watched_is_an_error(simulate: Callable[..., Simulation], tmp_path: Path) -> None:
    """Where no flight file can be made, the simulation ends with status 1 and says what is wrong."""
    directory = tmp_path / "0" / "one"
    directory.mkdir(parents=True)
    (directory / "flight").write_text("in the way")
    simulation = simulate("--no-exporters", "--deployment", "name=one")
    assert simulation.process.wait(PATIENCE) == 1
    simulation.read_until(simulation.told, str(directory / "flight"))
