"""
Flight files that have outlived their process and the retention time.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.node import Clock, Node
from rankscope_exporter.serve.settings import ServeSettings

Make = Callable[..., Any]


def later(seconds: float) -> Clock:
    return Clock(unix=lambda: time.time() + seconds)


def test_only_after_the_retention_time(flight_dir: Path, rank_file: Make) -> None:
    """The file of a process that is gone stays for the retention time, counted from its last step, and goes then."""
    rank = rank_file(0)
    rank.steps(2)
    rank.gone()

    assert Node(flight_dir, later(3500)).remove_expired(3600) == []
    assert Node(flight_dir, later(3700)).remove_expired(3600) == [rank.path]
    assert not rank.path.exists()


def test_never_of_a_live_process(flight_dir: Path, rank_file: Make) -> None:
    """The file of a process that lives stays, however long it has done nothing."""
    rank_file(0)

    assert Node(flight_dir, later(10**9)).remove_expired(0) == []


def test_never_what_is_not_understood(flight_dir: Path) -> None:
    """A file that is no flight file of this version may be another program's: it stays."""
    (flight_dir / "other.flight").write_bytes(b"x" * 100)

    assert Node(flight_dir, later(10**9)).remove_expired(0) == []


def test_a_clock_that_was_set_back(flight_dir: Path, rank_file: Make) -> None:
    """A wall clock that jumps back removes nothing."""
    rank_file(0).gone()

    assert Node(flight_dir, later(-(10**6))).remove_expired(3600) == []


def test_at_the_start_of_the_server(serve_settings: ServeSettings, rank_file: Make) -> None:
    """The running application removes them by itself, and no longer serves them."""
    old, young = rank_file(0), rank_file(1)
    old.gone()
    settings = serve_settings.model_copy(update={"retention_seconds": 3600.0})

    with TestClient(create_app(settings, clock=later(3700)), base_url="http://127.0.0.1") as client:
        keys = [rank["key"] for rank in client.get("/v1/ranks").json()["ranks"]]

    assert keys == [young.key]
