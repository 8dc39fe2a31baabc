"""
Which flight files are removed, and when.
"""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter, process_start_ticks
from rankscope_exporter.retention import FlightAge, is_gone, plan_removals, remove_expired


@settings(deadline=None)
@given(gone=st.booleans(), age=st.floats(0, 1e6), retention=st.floats(0, 1e6))
def test_only_old_files_of_gone_processes_go(gone: bool, age: float, retention: float):
    """A file goes if its process is gone and it is older than the retention time, and else stays."""
    file = FlightAge(Path("a"), gone, age)
    assert plan_removals([file], retention) == ([Path("a")] if gone and age > retention else [])


def test_the_file_of_a_process_that_died_is_removed_after_its_time(tmp_path: Path):
    """While its process lives a file stays; once it is gone, it stays for the retention time, and then goes."""
    ours = FlightWriter(tmp_path, "ours", {})
    code = f"from rankscope_exporter.flight.writer import FlightWriter; from pathlib import Path; FlightWriter(Path({str(tmp_path)!r}), 'theirs', {{}})"
    subprocess.run([sys.executable, "-c", code], check=True)
    theirs = tmp_path / "theirs.flight"
    made = theirs.stat().st_mtime
    assert remove_expired(tmp_path, 100, now=lambda: made + 50) == []
    assert remove_expired(tmp_path, 100, now=lambda: made + 200) == [theirs]
    assert ours.path.exists()


def test_foreign_files_are_never_removed(tmp_path: Path):
    """What cannot be read as a flight file is not ours to remove."""
    foreign = tmp_path / f"x{layout.SUFFIX}"
    foreign.write_text("hello")
    assert remove_expired(tmp_path, 0, now=lambda: 1e12) == []
    assert foreign.exists()


def test_a_reused_process_number_is_not_the_same_process():
    """The start time tells a process from a later one with its number."""
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    assert not is_gone(os.getpid(), ticks)
    assert is_gone(os.getpid(), ticks - 1)
