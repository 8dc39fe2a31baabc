"""The desk: incidents of all engines, over restarts, with a store that comes and goes."""

import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ranks import ManualClock, made_engine, made_rank, made_records, made_report
from structlog.testing import capture_logs

from rankscope_exporter.contract import RankLife
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.incident import IncidentLife
from rankscope_server.domain.incident_life import CLOSE_SECONDS
from rankscope_server.domain.model import Finding, FindingKind, RankId, Severity
from rankscope_server.incidents import desk as desk_module
from rankscope_server.incidents.desk import IncidentDesk
from rankscope_server.incidents.reading import CaptureFile
from rankscope_server.store import Store, StoreError, open_store
from rankscope_server.store.incidents import IncidentStore

pytestmark = pytest.mark.anyio

PP0, PP1 = RankId(0, 0, 0), RankId(0, 1, 0)
DRIFT, MASK, GUARD, WEDGED = (
    FindingKind.DRIFT,
    FindingKind.MASK_DISAGREEMENT,
    FindingKind.GUARD_DISAGREEMENT,
    FindingKind.WEDGED,
)
RETENTION = 7 * 86400.0


def finding(kind):
    severity = Severity.WARNING if kind in {DRIFT, FindingKind.BLIND, FindingKind.STALLED} else Severity.CRITICAL
    ranks = () if kind is FindingKind.BLIND else (PP0, PP1)
    return Finding(kind, severity, f"{kind.value} at step 10", 10, ranks, 100.0, found_unix=100.5)


class Scene:
    """Engines that are looked at, and a desk; a test says what holds and when the server is restarted."""

    def __init__(self, store: Store | None, clock: ManualClock):
        self.store = store
        self.clock = clock
        self.desk = IncidentDesk(clock, retention_seconds=RETENTION)

    def look(self, *kinds, engine="e1", seconds=1.0, steps=30, ended=False, replaced=False, reached=True):
        self.clock.advance(seconds)
        now = self.clock.now()
        life = RankLife.GONE if ended or replaced else RankLife.RUNNING
        reports = [made_report(pp, engine=engine, life=life) for pp in (0, 1)]
        ranks = [made_rank(made_records(1, steps), report, now=now, quiet=0.1) for report in reports]
        answered, error = (now.monotonic, "") if reached else (now.monotonic - 9, "refused")
        facts = made_engine(*ranks, now=now, answered=answered, error=error, replaced=replaced)
        memory = EngineMemory(
            findings={(kind, -1 if kind is FindingKind.BLIND else 0): finding(kind) for kind in kinds}
        )
        self.desk.observe(facts, memory, now)

    async def restart(self):
        self.desk = IncidentDesk(self.clock, retention_seconds=RETENTION)
        await self.desk.restore(self.store, {"chat"})

    async def keep(self):
        await self.desk.keep(self.store)

    @property
    def open_id(self):
        return self.desk.open_on("chat", "e1")

    async def timeline(self, incident):
        view = await self.desk.view(incident)
        return [event.what for event in view.timeline]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = await open_store(f"sqlite+aiosqlite:///{tmp_path / 'rankscope.db'}")
    yield made
    await made.close()


@pytest.fixture
async def scene(store: Store) -> Scene:
    made = Scene(store, ManualClock())
    await made.desk.restore(store, {"chat"})
    return made


async def test_a_healthy_engine_has_no_incident(scene):
    """Nothing is kept of it."""
    scene.look()
    await scene.keep()
    assert (scene.open_id, scene.desk.open_count, await scene.desk.cards(9)) == ("", 0, ())
    assert await scene.desk.view("i-nothing") is None
    assert await scene.desk.capture("i-nothing", 0) is None


async def test_each_turn_for_the_worse_is_captured_once(scene):
    """Opened, worse, wedged, ended: four copies, whatever happens in between."""
    scene.look(DRIFT)
    incident = scene.open_id
    await scene.keep()
    scene.look(DRIFT, steps=40)
    await scene.keep()
    scene.look(DRIFT, MASK, steps=50)
    await scene.keep()
    scene.look(DRIFT, MASK, GUARD, steps=60)
    await scene.keep()
    scene.look(MASK, GUARD, WEDGED, steps=70)
    await scene.keep()
    scene.look(MASK, GUARD, ended=True, steps=71)
    await scene.keep()
    scene.look(MASK, GUARD, replaced=True, steps=71)
    await scene.keep()
    view = await scene.desk.view(incident)
    assert [(one.life, one.last_step, one.ranks) for one in view.captures] == [
        (IncidentLife.OPEN, 30, 2),
        (IncidentLife.WORSENING, 50, 2),
        (IncidentLife.WEDGED, 70, 2),
        (IncidentLife.WEDGED, 71, 2),
    ]
    assert view.card.life is IncidentLife.CLOSED
    for number, capture in enumerate(view.captures):
        data = await scene.desk.capture(incident, number)
        assert len(data) == capture.size_bytes
        manifest = CaptureFile(data).manifest
        assert (manifest.incident, manifest.life) == (incident, capture.life)
    assert await scene.desk.capture(incident, 4) is None


async def test_an_engine_that_is_gone_leaves_its_last_records(scene):
    """Its flight files were removed: what the server holds is what is left."""
    scene.look(DRIFT)
    incident = scene.open_id
    await scene.keep()
    scene.look(DRIFT, steps=44)
    scene.desk.absent("other", (), scene.clock.now())
    scene.desk.absent("chat", ("e1",), scene.clock.now())
    assert scene.open_id == incident
    scene.desk.absent("chat", (), scene.clock.now())
    assert scene.open_id == ""
    await scene.keep()
    view = await scene.desk.view(incident)
    assert [one.last_step for one in view.captures] == [30, 44]
    assert view.card.life is IncidentLife.CLOSED
    scene.desk.forget("chat", "e1", scene.clock.now())


async def test_a_restart_goes_on_with_the_same_incident(scene):
    """Timeline, captures and findings are there; the same cause opens no other one."""
    scene.look(DRIFT)
    scene.look(DRIFT, MASK)
    incident = scene.open_id
    await scene.keep()
    before = await scene.desk.view(incident)
    await scene.restart()
    assert scene.open_id == incident
    assert await scene.desk.view(incident) == before
    scene.look(DRIFT, MASK)
    await scene.keep()
    assert await scene.timeline(incident) == ["found", "worsening", "captured"]
    assert await scene.desk.capture(incident, 0) is not None
    scene.look(replaced=True)
    await scene.keep()
    await scene.restart()
    assert [card.id for card in await scene.desk.cards(9)] == [incident]
    assert scene.open_id == ""


async def test_a_restart_begins_the_time_of_recovery_anew(scene):
    """What another run saw is not counted."""
    scene.look(DRIFT)
    scene.look(seconds=1)
    scene.look(seconds=CLOSE_SECONDS - 1)
    await scene.keep()
    await scene.restart()
    scene.look(seconds=5)
    assert scene.open_id
    scene.look(seconds=CLOSE_SECONDS)
    assert not scene.open_id


async def test_a_deployment_that_is_not_watched_any_more_closes_its_incidents(scene):
    """Nobody will ever say how they went on."""
    scene.look(DRIFT)
    incident = scene.open_id
    await scene.keep()
    again = IncidentDesk(scene.clock, retention_seconds=RETENTION)
    await again.restore(scene.store, {"other"})
    assert (await again.view(incident)).card.life is IncidentLife.CLOSED


async def test_many_copies_are_made_worst_first_and_not_all_at_once(scene, monkeypatch):
    """So that the caller comes to its other work; what closes before it is copied is copied as it stood."""
    monkeypatch.setattr(desk_module, "CAPTURE_SECONDS", 0.0)
    scene.look(DRIFT, engine="e1")
    first = scene.open_id
    scene.look(GUARD, WEDGED, engine="e2")
    second = scene.desk.open_on("chat", "e2")
    scene.look(engine="e1", replaced=True)
    await scene.keep()
    assert [len((await scene.desk.view(one)).captures) for one in (first, second)] == [0, 1]
    await scene.keep()
    assert [one.life for one in (await scene.desk.view(first)).captures] == [IncidentLife.OPEN]


async def test_a_late_copy_of_a_closed_incident_leaves_the_next_one_alone(scene):
    """An engine that was gone and is back has a new incident; the old one is still copied."""
    scene.look(DRIFT)
    first = scene.open_id
    scene.desk.absent("chat", (), scene.clock.now())
    scene.look(DRIFT)
    second = scene.open_id
    await scene.keep()
    assert (scene.open_id, first != second) == (second, True)
    assert (await scene.timeline(first))[-1] == "captured"
    assert len(await scene.desk.cards(9)) == 2


class Failing:
    """A store that is away."""

    async def read(self, query):
        raise StoreError("store away: see that it is there")

    async def write(self, *statements):
        raise StoreError("store away: see that it is there")


async def test_nothing_is_lost_while_the_store_is_away(scene, store, monkeypatch):
    """Captures are made all the same and can be had; all of it is kept when the store is back."""
    monkeypatch.setattr(scene.desk, "_store", IncidentStore(Failing()))
    scene.look(DRIFT)
    incident = scene.open_id
    with pytest.raises(StoreError, match="away"):
        await scene.keep()
    assert zipfile.is_zipfile(io.BytesIO(await scene.desk.capture(incident, 0)))
    assert [card.id for card in await scene.desk.cards(9)] == [incident]
    assert "store away" in scene.desk.problem
    assert await scene.desk.view("i-old") is None
    assert await scene.desk.capture("i-old", 0) is None
    monkeypatch.setattr(scene.desk, "_store", IncidentStore(store))
    await scene.keep()
    assert len(await scene.desk.cards(9)) == 1
    assert scene.desk.problem == ""
    await scene.restart()
    assert await scene.desk.capture(incident, 0) is not None


async def test_captures_that_wait_for_the_store_are_bounded(scene, monkeypatch):
    """The oldest go, and the timeline says so."""
    monkeypatch.setattr(desk_module, "MAX_UNSAVED_BYTES", 1)
    scene.look(DRIFT)
    incident = scene.open_id
    await scene.desk.keep(None)
    view = await scene.desk.view(incident)
    assert not view.captures[0].kept
    assert (
        view.timeline[-1].sentence == "Copy 1 of the flight records was removed: the store has been away for too long."
    )
    assert await scene.desk.capture(incident, 0) is None


async def test_what_opened_before_the_store_could_be_read_is_the_same_incident(scene):
    """A restart with a store that comes late: the older one goes on, under both names."""
    scene.look(DRIFT)
    first = scene.open_id
    await scene.keep()
    scene.desk = IncidentDesk(scene.clock, retention_seconds=RETENTION)
    scene.look(DRIFT, MASK, seconds=60, steps=40)
    second = scene.open_id
    await scene.desk.keep(None)
    await scene.desk.restore(scene.store, {"chat"})
    await scene.keep()
    assert (scene.open_id, first != second) == (first, True)
    view = await scene.desk.view(second)
    assert (view.card.id, [one.last_step for one in view.captures]) == (first, [30, 40])
    assert [one.kind for one in view.findings] == [DRIFT, MASK]
    assert CaptureFile(await scene.desk.capture(second, 1)).manifest.incident == second
    assert [event.what for event in view.timeline] == ["found", "captured", "found", "found", "captured"]
    assert [card.id for card in await scene.desk.cards(9)] == [first]


async def test_old_captures_go_and_the_timeline_says_so(scene, store, monkeypatch):
    """Those of incidents that were closed long ago, and the oldest where all take too much room."""
    for number in range(3):
        scene.look(DRIFT, engine=f"e{number}")
    ids = [scene.desk.open_on("chat", f"e{number}") for number in range(3)]
    await scene.keep()
    size = (await scene.desk.view(ids[0])).captures[0].size_bytes
    monkeypatch.setattr(scene.desk, "_most_capture_bytes", int(2.5 * size))
    scene.clock.advance(desk_module.SWEEP_SECONDS)
    await scene.keep()
    assert [await scene.desk.capture(one, 0) is not None for one in ids] == [False, True, True]
    assert (await scene.timeline(ids[0]))[-1] == "capture removed"
    scene.look(engine="e2", replaced=True)
    await scene.keep()
    scene.clock.advance(RETENTION + 1)
    await scene.keep()
    await scene.keep()
    assert [await scene.desk.capture(one, 0) is not None for one in ids] == [False, True, False]
    assert [row.incident for row in await IncidentStore(store).captures()] == [ids[1]]
    await scene.restart()
    assert (await scene.timeline(ids[2]))[-1] == "capture removed"
    scene.clock.advance(desk_module.FORGET_SECONDS)
    await scene.keep()
    assert {card.id for card in await scene.desk.cards(9)} >= set(ids[:2])
    assert await IncidentStore(store).find(ids[2]) is None


async def test_cards_have_what_is_open_first(scene):
    """Then the newest; of one deployment where that is asked for."""
    scene.look(DRIFT, engine="e1")
    first = scene.open_id
    scene.look(DRIFT, engine="e2")
    second = scene.desk.open_on("chat", "e2")
    scene.look(engine="e2", replaced=True)
    scene.look(DRIFT, engine="e3")
    third = scene.desk.open_on("chat", "e3")
    assert [card.id for card in await scene.desk.cards(9)] == [third, first, second]
    assert [card.id for card in await scene.desk.cards(2, "chat")] == [third, first]
    assert await scene.desk.cards(9, "other") == ()


async def test_what_is_done_is_noted_where_an_incident_is_open(scene):
    """On one engine, or on all of a deployment."""
    scene.look(DRIFT, engine="e1")
    scene.look(DRIFT, engine="e2")
    now = scene.clock.now().unix
    scene.desk.note("chat", "", "fix asked", "ada turned the trim fix on.", now)
    scene.desk.note("chat", "e2", "alert", "RankscopeDrift fires.", now)
    scene.desk.note("chat", "e9", "alert", "RankscopeDrift fires.", now)
    assert await scene.timeline(scene.desk.open_on("chat", "e1")) == ["found", "fix asked"]
    assert await scene.timeline(scene.desk.open_on("chat", "e2")) == ["found", "fix asked", "alert"]


async def test_a_copy_that_fails_keeps_the_incident_from_nothing(scene, monkeypatch):
    """It is told, and not tried for ever."""

    async def fail(subject, now):
        raise RuntimeError("boom")

    monkeypatch.setattr(desk_module, "make_capture", fail)
    scene.look(DRIFT)
    with capture_logs() as logs:
        await scene.keep()
        await scene.keep()
    assert [line["event"] for line in logs].count("incident.capture_crashed") == 1
    assert await scene.timeline(scene.open_id) == ["found", "capture failed"]


async def test_closed_incidents_are_held_in_the_store(scene, monkeypatch):
    """Memory keeps a few; the rest can still be had."""
    monkeypatch.setattr(desk_module, "CLOSED_HELD", 1)
    ids = []
    for _ in range(3):
        scene.look(DRIFT)
        ids.append(scene.open_id)
        scene.look(replaced=True)
    await scene.keep()
    assert list(scene.desk._closed) == ids[-1:]
    assert [card.id for card in await scene.desk.cards(9)] == ids[::-1]
    assert (await scene.desk.view(ids[0])).card.id == ids[0]


KINDS = st.sets(st.sampled_from(list(FindingKind)), max_size=4)
LOOKS = st.tuples(
    st.just("look"),
    KINDS,
    st.sampled_from([0.0, 1.0, 30.0, 200.0]),
    st.sampled_from(["running", "running", "running", "ended", "replaced"]),
    st.sampled_from([True, True, True, False]),
)
OTHERS = st.tuples(st.sampled_from(["keep", "restart", "gone", "back", "note"]))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.one_of(LOOKS, LOOKS, OTHERS), max_size=16))
def test_whatever_happens_an_engine_has_one_incident_at_most(script):
    """Findings, ends, silence, restarts and clock jumps in any order: ordered timelines, and nothing closed without cause."""
    anyio.run(_play, script)


async def _play(script):
    store = await open_store("sqlite+aiosqlite://")
    scene = Scene(store, ManualClock())
    await scene.desk.restore(store, {"chat"})
    gone = False
    known = set()
    try:
        for what, *rest in script:
            before = scene.open_id
            if what == "look":
                kinds, seconds, state, reached = rest
                scene.look(
                    *kinds, seconds=seconds, ended=state == "ended", replaced=state == "replaced", reached=reached
                )
                gone = state == "replaced"
            elif what == "keep":
                await scene.keep()
            elif what == "restart":
                await scene.keep()
                await scene.restart()
                assert scene.open_id == before
            elif what == "gone":
                scene.desk.absent("chat", (), scene.clock.now())
                gone = True
            elif what == "back":
                moment = scene.clock.moment
                scene.clock.moment = type(moment)(moment.unix - 50.0, moment.monotonic)
            else:
                scene.desk.note("chat", "e1", "alert", "It fires.", scene.clock.now().unix)
            known |= {scene.open_id} - {""}
            if before and scene.open_id != before:
                view = await scene.desk.view(before)
                assert view.card.life is IncidentLife.CLOSED
                assert gone or any(event.what == "recovered" for event in view.timeline)
            cards = await scene.desk.cards(99)
            assert {card.id for card in cards} == known
            assert [card.id for card in cards if card.life is not IncidentLife.CLOSED] == [
                one for one in [scene.open_id] if one
            ]
            for card in cards:
                view = await scene.desk.view(card.id)
                times = [event.at_unix for event in view.timeline]
                assert times == sorted(times)
                assert times[0] >= card.opened_unix
                assert len(view.captures) <= 4
                assert (card.closed_unix is None) == (card.life is not IncidentLife.CLOSED)
    finally:
        await store.close()
