"""
Live streams.
"""

import dataclasses

import fake_rankscope as views
from fake_rankscope import ENGINES, FakeRankscope
from starlette.testclient import TestClient

from rankscope_server.domain.model import State

ENGINE = f"/live/deployments/baseline/engines/{ENGINES['baseline']}"


def test_begins_with_everything(follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
    """A stream begins with every fragment, the series and a heartbeat."""
    fake.draw(views.growing_series(views.NOW, seconds=10))

    async def body(reader) -> None:  # type: ignore[no-untyped-def]
        fragments = await reader.next()
        assert fragments.name == ""
        assert fragments.data.count("<hx-partial") == 11  # Nine of the page, and two counts beside the links.
        assert len((await reader.next("series")).json()["times"]) == 10
        assert (await reader.next("heartbeat")).json() == {"version": fake.version, "data_age_seconds": 0.3}

    follow(ENGINE, body)


def test_sends_only_what_changed(follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
    """A change brings the fragments that it touches, and says a new state aloud."""

    async def body(reader) -> None:  # type: ignore[no-untyped-def]
        await reader.next("heartbeat")
        fake.show(dataclasses.replace(views.drifting(), state=State.PARTED, headline="At step 413 they parted."))
        changed = await reader.next("")
        assert changed.data.count("<hx-partial") == 1
        assert 'hx-target="#engine-headline"' in changed.data
        assert "At step 413 they parted." in changed.data
        assert (await reader.next("announce")).data == "baseline 7c1d90e2b44f4be0 is now parted."

    follow(ENGINE, body)


def test_silence_is_heartbeats(follow) -> None:  # type: ignore[no-untyped-def]
    """While nothing changes only heartbeats come."""

    async def body(reader) -> None:  # type: ignore[no-untyped-def]
        await reader.next("heartbeat")
        assert [(await reader.next()).name for _ in range(2)] == ["heartbeat", "heartbeat"]

    follow(ENGINE, body)


def test_points(follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
    """New samples come as points."""
    series = views.growing_series(views.NOW, seconds=10)
    fake.draw(series)

    async def body(reader) -> None:  # type: ignore[no-untyped-def]
        await reader.next("series")
        at = series.times_unix[-1] + 1
        fake.draw(
            dataclasses.replace(series, times_unix=[*series.times_unix, at], values=[[*v, 5.0] for v in series.values])
        )
        assert (await reader.next("points")).json() == {
            "times": [at],
            "labels": ["pp0", "pp1"],
            "values": [[5.0], [5.0]],
        }

    follow(ENGINE, body)


def test_engine_that_leaves(follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
    """When the engine is no longer known the stream says so and ends."""

    async def body(reader) -> None:  # type: ignore[no-untyped-def]
        await reader.next("heartbeat")
        fake.forget(views.drifting())
        assert "no longer known" in (await reader.next("gone")).data
        assert await reader.next() is None

    follow(ENGINE, body)


def test_fleet_sends_one_card(follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
    """A change of one deployment brings its card and nothing else."""

    async def body(reader) -> None:  # type: ignore[no-untyped-def]
        first = await reader.next("")
        assert first.data.count("<hx-partial") == 4
        fake.now += 1  # Figures and sentences of a card may lag by a second.
        fake.show(dataclasses.replace(views.drifting(), headline="Still drifting."))
        changed = await reader.next("")
        assert changed.data.count("<hx-partial") == 1
        assert 'hx-target="#deployment-baseline"' in changed.data

    follow("/live/fleet", body)


def test_fleet_shows_a_new_state_at_once(follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
    """A state that changes is not held back, however short a time ago the card was rendered."""

    async def body(reader) -> None:  # type: ignore[no-untyped-def]
        await reader.next("heartbeat")
        fake.show(dataclasses.replace(views.drifting(), state=State.PARTED))
        assert ">parted<" in (await reader.next("")).data

    follow("/live/fleet", body)


def test_fleet_in_a_new_order(follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
    """When the order of need changes the whole list comes."""

    async def body(reader) -> None:  # type: ignore[no-untyped-def]
        await reader.next("heartbeat")
        fake.show(dataclasses.replace(views.healthy(), state=State.WEDGED))
        changed = await reader.next("")
        assert 'hx-target="#fleet-deployments"' in changed.data
        assert 'hx-target="#fleet-summary"' in changed.data
        assert 'hx-target="#deployment-steady"' not in changed.data

    follow("/live/fleet", body)


def test_ends_with_the_server(follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
    """A stream ends when the server shuts down."""

    async def body(reader) -> None:  # type: ignore[no-untyped-def]
        await reader.next("heartbeat")
        fake.closing = True
        while await reader.next() is not None:
            pass

    follow("/live/fleet", body)


def test_unknown_engine(client: TestClient) -> None:
    """A stream of an engine that is not there is a plain 404."""
    assert client.get("/live/deployments/baseline/engines/nope").status_code == 404
