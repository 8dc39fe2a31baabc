"""
The flight directory of a soak, with and without room.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from ground import PRIVATE, Ground

from rankscope_exporter.flight.layout import file_bytes
from rankscope_exporter.flight.writer import FlightWriter

CAPACITY = 64
SCRIPT = """
import json, sys
from ground import Ground, enter_namespace
enter_namespace()
from test_ground import CAPACITY, try_writing
from rankscope_exporter.flight.layout import file_bytes
ground = Ground(file_bytes(CAPACITY))
tried = [try_writing(ground)]
for name in tried[0]:
    (ground.flight / name).unlink()
ground.fill()
tried.append(try_writing(ground))
ground.make_room()
tried.append(try_writing(ground))
left = [ground.left_in_shared_memory(), ground.left_in_temporary()]
ground.remove()
print(json.dumps([tried, left, ground.work.exists()]))
"""


def try_writing(ground: Ground) -> list[str]:
    """What lies in the flight directory after a rank has tried to make its file there."""
    with contextlib.suppress(OSError):
        FlightWriter(ground.flight, "rank", {}, capacity=CAPACITY)
    return ground.flight_entries()


def test_a_full_directory_takes_no_file_until_it_has_room_again(tmp_path: Path) -> None:
    """In a namespace of its own where one may be made, otherwise without: a file, none and no remains of one, a file."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": here, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tried, left, still_there = json.loads(done.stdout)
    assert tried == [["rank.flight"], [], ["rank.flight"]]
    assert left == [[], []]
    assert not still_there


def test_without_a_namespace_a_file_stands_in_place_of_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be mounted, a rank finds no directory, and finds one again afterwards."""
    monkeypatch.delenv(PRIVATE, raising=False)
    ground = Ground(file_bytes(CAPACITY))
    try:
        assert not ground.private
        ground.fill()
        assert try_writing(ground) == []
        ground.make_room()
        assert try_writing(ground) == ["rank.flight"]
    finally:
        ground.remove()
    assert not ground.work.exists()
