"""What outlives the server."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from made_ranks import START_UNIX

from rankscope_server.domain.model import AuditRow, Finding, FindingKind, RankId, Severity
from rankscope_server.store import DesiredRow, SampleRow, Store, StoreError, StoreVersionError, open_store

pytestmark = pytest.mark.anyio

RANK = RankId(0, 1, 0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = await open_store(url(tmp_path))
    yield made
    await made.close()


def url(directory: Path) -> str:
    return f"sqlite+aiosqlite:///{directory / 'data' / 'rankscope.db'}"


def audit(action="turn the trim fix on", deployment="chat"):
    return AuditRow(START_UNIX, "ada", deployment, "e1", action, "pp0 and pp1", "accepted")


async def test_a_toggle_and_who_did_it_are_kept(store: Store, tmp_path: Path):
    """Both are there after a restart, newest first."""
    await store.save_toggle(DesiredRow("chat", "", True, 1, "ada", START_UNIX), audit())
    await store.add_audit(audit("acknowledged"), generation=1)
    again = await open_store(url(tmp_path))
    assert await again.desired() == [DesiredRow("chat", "", True, 1, "ada", START_UNIX)]
    assert [row.action for row in await again.audit(10)] == ["acknowledged", "turn the trim fix on"]
    assert await again.acknowledged() == {("e1", 1)}
    assert await again.audit(10, "other") == []
    await again.close()


async def test_what_is_said_of_a_deployment_undoes_what_was_said_of_its_engines(store: Store):
    """The last word counts; other deployments keep theirs."""
    await store.save_toggle(DesiredRow("chat", "e1", True, 1, "ada", START_UNIX), audit())
    await store.save_toggle(DesiredRow("other", "", True, 1, "ada", START_UNIX), audit())
    await store.save_toggle(DesiredRow("chat", "", False, 2, "ben", START_UNIX), audit())
    assert {(row.deployment, row.engine, row.desired) for row in await store.desired()} == {
        ("chat", "", False),
        ("other", "", True),
    }


async def test_samples_are_kept_once_and_forgotten_in_time(store: Store):
    """The same second again changes nothing."""
    rows = [SampleRow("chat", "e1", RANK, second, second, 9, 20, 4) for second in range(100, 110)]
    await store.add_samples(rows)
    await store.add_samples([SampleRow("chat", "e1", RANK, 105, 999, 9, 20, 4)])
    assert [row.drift_max for row in await store.samples("chat", "e1", 104, 107)] == [104, 105, 106]
    await store.remove_samples(before=108)
    assert [row.second for row in await store.samples("chat", "e1", 0, 1000)] == [108, 109]


async def test_open_findings_come_back(store: Store):
    """With step, ranks and times; closed ones do not."""
    finding = Finding(
        FindingKind.GUARD_DISAGREEMENT,
        Severity.CRITICAL,
        "at step 72",
        72,
        (RANK,),
        START_UNIX,
        open=True,
        found_unix=START_UNIX + 0.2,
    )
    await store.open_finding("chat", "e1", finding, START_UNIX)
    await store.open_finding(
        "chat", "e1", Finding(FindingKind.DRIFT, Severity.WARNING, "", 3, (RANK,), START_UNIX), START_UNIX
    )
    await store.close_finding("chat", "e1", "drift", START_UNIX + 5)
    assert await store.open_findings() == [("chat", "e1", finding)]


async def test_a_store_of_a_newer_server_is_refused(store: Store, tmp_path: Path):
    """Rather than written to in a way that the newer one does not expect."""
    await store.close()
    with sqlite3.connect(tmp_path / "data" / "rankscope.db") as connection:
        connection.execute("UPDATE meta SET value = '99'")
    connection.close()
    with pytest.raises(StoreVersionError, match=r"version 99.*upgrade the server, or use another --data-dir"):
        await open_store(url(tmp_path))


async def test_a_store_that_cannot_be_opened_names_the_remedy(tmp_path: Path):
    """A file where the directory belongs, a damaged file, a URL that is none."""
    (tmp_path / "data").write_text("")
    with pytest.raises(StoreError, match="--data-dir"):
        await open_store(url(tmp_path))
    (tmp_path / "bad.db").write_bytes(b"this is not a database" * 100)
    with pytest.raises(StoreError, match="damaged"):
        await open_store(f"sqlite+aiosqlite:///{tmp_path / 'bad.db'}")
    with pytest.raises(StoreError, match="database URL"):
        await open_store("nonsense")
