"""
What a soak reads of a process, and how it tells growth.
"""

import os
import threading
from pathlib import Path

from vitals import Vitals, assess_growth, is_worker, read_vitals


def samples(memory_kib: list[int], descriptors: int = 5) -> list[Vitals]:
    """A sample a second."""
    return [Vitals(float(n), kib, kib + 1000, descriptors, 2) for n, kib in enumerate(memory_kib)]


def test_own_vitals_are_read(tmp_path: Path) -> None:
    """A process's memory, descriptors and threads are those that it has."""
    found = read_vitals(os.getpid(), 1.0, tmp_path)
    assert found is not None
    assert found.threads >= threading.active_count()  # libraries have threads of their own
    assert found.resident_kib > found.memory_kib > 1000
    reader, writer = os.pipe()
    try:
        again = read_vitals(os.getpid(), 2.0, tmp_path)
    finally:
        os.close(reader)
        os.close(writer)
    assert again is not None
    assert again.descriptors == found.descriptors + 2


def test_a_descriptor_of_a_removed_file_is_a_leak(tmp_path: Path) -> None:
    """Files that are there in the directory set apart are not counted, those removed from it are."""
    before = read_vitals(os.getpid(), 1.0, tmp_path)
    path = tmp_path / "rank.flight"
    with path.open("wb"):
        there = read_vitals(os.getpid(), 2.0, tmp_path)
        path.unlink()
        removed = read_vitals(os.getpid(), 3.0, tmp_path)
    assert before is not None
    assert there is not None
    assert removed is not None
    assert [there.descriptors, removed.descriptors] == [before.descriptors, before.descriptors + 1]


def test_a_process_that_is_not_there_has_none() -> None:
    """No vitals of a pid that nobody has; and it is no rank of vLLM."""
    assert read_vitals(2**22 + 1, 0.0, Path()) is None
    assert not is_worker(2**22 + 1)
    assert not is_worker(os.getpid())


def test_a_warm_up_is_no_growth() -> None:
    """What a process takes in its first seconds does not count."""
    growth = assess_growth(samples([*range(0, 10_000, 1000), *[20_000] * 40]), warm_up_seconds=10)
    assert growth is not None
    assert (growth.memory_kib, growth.slope_kib_per_minute, growth.seconds) == (0, 0.0, 39.0)


def test_a_leak_shows_as_growth_and_slope() -> None:
    """10 KiB a second are 600 a minute, and three quarters of all that was leaked lies between first and last quarter."""
    growth = assess_growth(samples([1000 + 10 * n for n in range(50)]), warm_up_seconds=10)
    assert growth is not None
    assert growth.slope_kib_per_minute == 600.0
    assert growth.memory_kib == 300


def test_too_few_samples_tell_nothing() -> None:
    """A process that was there for seconds only is not judged."""
    assert assess_growth(samples([1, 2, 3]), warm_up_seconds=0) is None
    assert assess_growth([], warm_up_seconds=0) is None
