"""
Ranks in another process namespace: whether they live is unknown, and nothing is made of it.
"""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from rankscope_exporter.contract import ControlCommand, Mitigation, RankLife
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_exporter.namespaces import is_foreign, read_pid_namespace
from rankscope_exporter.retention import FOREIGN_SECONDS, FlightAge, plan_removals, remove_expired
from rankscope_exporter.serve.control import refusal
from rankscope_exporter.serve.node import Clock, Node

Make = Callable[..., Any]
ELSEWHERE = 1
"""No namespace of this machine has this inode."""
SEPARATE = """
import json
import sys
from pathlib import Path
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_exporter.namespaces import read_pid_namespace
FlightWriter(Path(sys.argv[1]), "theirs", {**json.loads(sys.argv[2]), "pid_namespace": read_pid_namespace()})
print("made", flush=True)
sys.stdin.read()
"""


def test_own_namespace(tmp_path: Path) -> None:
    """A process knows the namespace that it lives in, and 0 where `/proc` does not say."""
    assert read_pid_namespace() == Path("/proc/self/ns/pid").stat().st_ino
    assert read_pid_namespace(tmp_path) == 0


@given(st.integers() | st.none() | st.text() | st.floats(), st.integers(0))
def test_foreign_only_if_both_are_known(namespace: Any, own: int) -> None:
    """A namespace is another one only if both are known and differ, whatever stands in the file."""
    known = isinstance(namespace, int) and namespace > 0 and own > 0

    assert is_foreign(namespace, own) == (known and namespace != own)


def test_life_is_unknown_elsewhere(flight_dir: Path, rank_file: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A rank of another namespace is neither running nor gone; the log names the remedy, once."""
    rank_file(0, pid_namespace=ELSEWHERE).steps(1)
    rank_file(1, pid_namespace=read_pid_namespace()).steps(1)
    node = Node(flight_dir, Clock())

    with caplog.at_level(logging.WARNING):
        lives = [[rank.life for rank in node.read().ranks] for _ in range(2)]

    assert lives == [[RankLife.UNKNOWN, RankLife.RUNNING]] * 2
    assert [rank.life for rank in node.steps(None).header.ranks] == lives[0]
    assert len(caplog.records) == 1
    assert "shareProcessNamespace: true" in caplog.text
    assert 'pid: "service:vllm"' in caplog.text


def test_health_says_so(client: TestClient, rank_file: Make) -> None:
    """A process that cannot tell whether its ranks live is not well, and says what to do."""
    rank_file(0, pid_namespace=ELSEWHERE)

    answer = client.get("/healthz").json()

    assert answer["status"] == "degraded"
    assert "process namespace" in answer["problems"][0]


def test_no_command_for_a_rank_of_unknown_life(flight_dir: Path, rank_file: Make) -> None:
    """A command needs ranks that are known to run, and says what to do."""
    rank_file(0, pid_namespace=ELSEWHERE)
    command = ControlCommand(engine="e1", desired=True, generation=1, effective_step=0)

    reason = refusal(command, Mitigation.TRIM, Node(flight_dir, Clock()).read().ranks)

    assert "unknown" in reason
    assert "process namespace" in reason


@given(age=st.floats(0, 1e6), retention=st.floats(0, 1e6))
def test_files_of_unknown_life_stay_for_a_day(age: float, retention: float) -> None:
    """A file of another namespace goes only when nothing was written for the retention time and a day."""
    file = FlightAge(Path("a"), gone=True, age_seconds=age, foreign=True)

    assert plan_removals([file], retention) == ([Path("a")] if age > max(retention, FOREIGN_SECONDS) else [])


def test_an_idle_rank_elsewhere_keeps_its_file(tmp_path: Path) -> None:
    """What a worker or an exporter sweeps away is never the file of a rank that it cannot see and that may only be idle."""
    file = FlightWriter(tmp_path, "theirs", {"pid_namespace": ELSEWHERE})
    made = file.path.stat().st_mtime

    assert remove_expired(tmp_path, 100, now=lambda: made + FOREIGN_SECONDS - 60) == []
    assert remove_expired(tmp_path, 100, now=lambda: made + FOREIGN_SECONDS + 60) == [file.path]


def test_a_real_namespace(flight_dir: Path, rank_file: Make) -> None:
    """A live process in a process namespace of its own is unknown to an exporter outside of it."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--pid", "--fork", "true"], capture_output=True, check=False).returncode:  # fmt: skip
        pytest.skip("needs unshare (util-linux) and the right to make a process namespace (root)")
    identity = rank_file(0).identity.model_dump_json()
    command = [unshare, "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", SEPARATE, str(flight_dir), identity]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"

        lives = {rank.key: rank.life for rank in Node(flight_dir, Clock()).read().ranks}

    assert lives == {"e1-dp0-pp0-tp0": RankLife.RUNNING, "theirs": RankLife.UNKNOWN}
