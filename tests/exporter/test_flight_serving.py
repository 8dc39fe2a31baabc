"""
The exporter process over flight files that change under it.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter.flight import layout
from rankscope_exporter.serve.node import Clock, Node

Make = Callable[..., Any]


@pytest.fixture
def node(flight_dir: Path) -> Node:
    """The node over the flight directory."""
    return Node(flight_dir, Clock(), name="node-a")


def test_cut_between_listing_and_reading(node: Node, rank_file: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is cut after it was listed takes its own rank out of the answers, not the others, and not the process."""
    good, bad = rank_file(0), rank_file(1)
    good.steps(5)
    bad.steps(5)
    before = node.steps(None)
    scan = node._files.scan

    def scan_and_cut() -> Any:
        found = scan()
        os.truncate(bad.path, 100)
        return found

    monkeypatch.setattr(node._files, "scan", scan_and_cut)
    good.step(6)
    for read in (lambda: node.steps(before.header.cursor), lambda: node.steps(None)):
        os.truncate(bad.path, layout.file_bytes(64))
        assert [rank.key for rank in read().header.ranks] == [good.key]
    os.truncate(bad.path, layout.file_bytes(64))
    assert [rank.key for rank in node.read().ranks] == [good.key]


def test_a_table_that_was_left_half_written(node: Node, rank_file: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A rank whose table cannot be read is left out of the answer, as 0 would be a claim; the log says so once."""
    good, bad = rank_file(0), rank_file(1)
    layout.TABLE_HEAD.pack_into(bad.writer.memory, layout.TABLE_OFFSET, 1, 0, 0)

    with caplog.at_level(logging.WARNING):
        tables = [node.requests().tables for _ in range(3)]

    assert [[table.key for table in answer] for answer in tables] == [[good.key]] * 3
    assert [record.message for record in caplog.records] == [
        f"no answer about requests: {bad.path.name}: the request table is damaged or half written"
    ]


def test_other_versions_are_skipped(node: Node, rank_file: Make, flight_dir: Path) -> None:
    """Files of an older and a newer version are told of with what to do, and the others are served."""
    good = rank_file(0)
    for version in (1, 3):
        raw = bytearray(good.path.read_bytes())
        raw[8] = version
        (flight_dir / f"v{version}.flight").write_bytes(raw)

    reading = node.read()

    assert [rank.key for rank in reading.ranks] == [good.key]
    reasons = {Path(file.path).name: file.reason for file in reading.unreadable}
    assert "version 1 is older" in reasons["v1.flight"]
    assert "restart its vLLM" in reasons["v1.flight"]
    assert "version 3 is newer" in reasons["v3.flight"]
    assert "upgrade rankscope-exporter" in reasons["v3.flight"]
    assert node.remove_expired(0) == []
