"""
What several answers of NCCL's RAS port say together, and what a scrape shows of it.
"""

import asyncio
import logging

import pytest
from fake_ras import HASH, FakeRas, communicator, document, missing, rank, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import Metric

from rankscope_exporter.collectors.nccl import NcclView, collect
from rankscope_exporter.serve.ras import KEPT_INTERVALS, MOST_BACKOFF, MOST_TOLD, NcclWatch, RasWatch
from rankscope_exporter.serve.ras_address import RasAddress
from rankscope_exporter.serve.ras_answer import Answer, CutShortError, RasError, UnknownFormatError
from rankscope_exporter.serve.ras_client import ask
from rankscope_exporter.serve.ras_json import parse_json
from rankscope_exporter.serve.ras_text import parse_text

ADDRESS = RasAddress("localhost", 28028)
OTHER = "beef" * 4
INTERVAL = 15.0
relaxed = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Time:
    """
    A clock that is set.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    """A clock that stands until it is moved."""
    return Time()


@pytest.fixture
def watch(time: Time) -> RasWatch:
    """A watch over one port, asked every 15 seconds."""
    return RasWatch(ADDRESS, INTERVAL, time)


def two(first: int, second: int, *, name: str = HASH, pids: tuple[int, int] = (7000, 7001)) -> Answer:
    """A communicator of two ranks that launched so many broadcasts."""
    ranks = [rank(n, pids[n], counts={"Broadcast": count}) for n, count in enumerate((first, second))]
    return parse_json(document(communicator(ranks, name=name)))


def states(view: NcclView) -> dict[str, str]:
    return {seen.communicator.id: seen.state for seen in view.communicators}


def samples(*views: NcclView) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families: list[Metric] = list(collect(views))
    found = [(s.name, frozenset(s.labels.items()), s.value) for family in families for s in family.samples]
    assert len({key[:2] for key in found}) == len(found), "a series stands in the scrape twice"
    return {(name, labels): value for name, labels, value in found}


def value(view: NcclView, name: str, **labels: str) -> float | None:
    return samples(view).get((f"rankscope_nccl_{name}", frozenset({"address": str(ADDRESS), **labels}.items())))


def test_before_the_first_answer(watch: RasWatch) -> None:
    """Nothing is known before the first question, and nothing is shown as if it were."""
    assert samples(watch.view()) == {}
    assert watch.health()["reason"] == "not asked yet"


def test_frozen_mismatch(watch: RasWatch, time: Time) -> None:
    """A mismatch whose counts stand still for two intervals is frozen."""
    seen = []
    for _ in range(4):
        watch.heard(two(8, 7))
        seen.append((states(watch.view())[HASH], watch.view().communicators[0].unchanged_seconds))
        time.now += INTERVAL

    assert seen == [("mismatch", 0.0), ("mismatch", 15.0), ("frozen mismatch", 30.0), ("frozen mismatch", 45.0)]


def test_slow_step(watch: RasWatch, time: Time) -> None:
    """A rank that is always behind but moves is a mismatch and no more."""
    for count in range(8, 14):
        watch.heard(two(count, count - 1))
        time.now += INTERVAL

    assert states(watch.view()) == {HASH: "mismatch"}
    assert value(watch.view(), "communicator_count_spread", communicator=HASH, collective="Broadcast") == 1


def test_age_without_answers(watch: RasWatch, time: Time) -> None:
    """While nothing is answered the last answer grows old, and does not freeze by that."""
    watch.heard(two(8, 7))
    for _ in range(4):
        time.now += INTERVAL
        watch.failed(RasError("timeout", "it says nothing"))

    assert (states(watch.view()), value(watch.view(), "communicator_age_seconds", communicator=HASH)) == ({HASH: "mismatch"}, 60.0)  # fmt: skip
    assert (value(watch.view(), "ras_up"), value(watch.view(), "ras_answer_age_seconds")) == (0, 60.0)


def test_old_answers_go(watch: RasWatch, time: Time) -> None:
    """What was said too long ago is not shown; how long ago is."""
    watch.heard(two(8, 7))
    time.now += KEPT_INTERVALS * INTERVAL + 1
    watch.failed(RasError("timeout", "it says nothing"))

    assert (watch.view().communicators, value(watch.view(), "ras_answer_age_seconds")) == ((), 121.0)


def test_engine_that_ended(watch: RasWatch) -> None:
    """Where nothing listens any more, no communicator is left."""
    watch.heard(two(8, 7))
    watch.failed(RasError("refused", "nothing listens"))

    assert (watch.view().communicators, watch.view().up) == ((), False)


def test_two_engines_on_one_port(watch: RasWatch, time: Time) -> None:
    """Engines that share the port answer in turns: each keeps its last answer until it speaks again, with its age."""
    watch.heard(two(8, 7))
    time.now += INTERVAL
    watch.heard(two(3, 3, name=OTHER, pids=(8000, 8001)))
    time.now += INTERVAL
    watch.heard(two(8, 7))

    assert states(watch.view()) == {HASH: "frozen mismatch", OTHER: "equal"}
    assert value(watch.view(), "communicator_age_seconds", communicator=OTHER) == INTERVAL
    assert value(watch.view(), "communicators", status="running", errors="mismatch") == 1


def test_new_communicators_of_the_same_processes(watch: RasWatch) -> None:
    """An answer about the same processes takes the place of the one before, whatever communicators they have by now."""
    watch.heard(two(8, 7))
    watch.heard(two(0, 0, name=OTHER))

    assert states(watch.view()) == {OTHER: "equal"}


def test_text_that_is_well_again(watch: RasWatch) -> None:
    """A healthy text names no communicator, and ends the mismatch that the one before it named."""
    where = "GPU 0 managed by process 7000 on node 10.1.2.3"
    warning = f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n  Rank 0 has launched up to operation 2 -- {where}\n\n"
    watch.heard(parse_text(text("0 1 1 2 2 2 RUNNING MISMATCH", warnings=warning)))
    before = states(watch.view())
    watch.heard(parse_text(text("0 1 1 2 2 2 RUNNING OK")))

    assert (before, states(watch.view())) == ({HASH: "mismatch"}, {})
    assert value(watch.view(), "communicators", status="running", errors="ok") == 1


def test_rank_samples(watch: RasWatch) -> None:
    """Counts by type stand under the rank, host, pid and device that NCCL names."""
    watch.heard(parse_json(document(communicator([rank(0, counts={"AllReduce": 9}, async_error=2)], [missing(1)]))))
    view = watch.view()
    first = {"communicator": HASH, "nccl_rank": "0", "host": "10.1.2.3", "pid": "7000", "cuda_device": "0"}
    second = first | {"nccl_rank": "1", "pid": "7001", "cuda_device": "1"}

    assert value(view, "collectives_total", **first, collective="AllReduce") == 9
    assert value(view, "rank_state", **first, state="running") == 1
    assert value(view, "rank_error", **first, kind="async", result="system error") == 1
    assert value(view, "rank_state", **second, state="unresponsive") == 1
    assert value(view, "collectives_total", **second, collective="AllReduce") is None
    assert value(view, "communicator_missing_ranks", communicator=HASH) == 1
    assert value(view, "communicator_ranks", communicator=HASH) == 2
    assert value(view, "communicator_state", communicator=HASH, state="error") == 1
    assert value(view, "info", nccl_version="2.29.1", format="json") == 1


def test_backing_off(watch: RasWatch) -> None:
    """Where nothing listens, questions grow rare, up to a bound; the first other outcome ends that."""
    delays = [watch.delay_seconds]
    for _ in range(8):
        watch.failed(RasError("refused", "nothing listens"))
        delays.append(watch.delay_seconds)
    watch.failed(RasError("timeout", "it says nothing"))

    assert delays[:3] == [INTERVAL, INTERVAL, 2 * INTERVAL]
    assert (max(delays), delays[-1]) == (MOST_BACKOFF * INTERVAL, MOST_BACKOFF * INTERVAL)
    assert watch.delay_seconds == INTERVAL


def test_unknown_format_is_told_once(watch: RasWatch, caplog: pytest.LogCaptureFixture) -> None:
    """An unknown format is counted each time and logged once for each version of NCCL."""
    with caplog.at_level(logging.INFO):
        for version in ("2.50.0", "2.50.0", "2.51.0"):
            watch.failed(UnknownFormatError("a line is not known", version))

    assert value(watch.view(), "ras_failures_total", reason="unknown format") == 3
    assert [("2.50.0" in r.message, "2.51.0" in r.message) for r in caplog.records] == [(True, False), (False, True)]


def test_log_is_bounded(watch: RasWatch, caplog: pytest.LogCaptureFixture) -> None:
    """A port that says another version each time does not fill the log."""
    for number in range(MOST_TOLD + 10):
        watch.failed(CutShortError("it ends", f"2.{number}.0"))

    assert len(caplog.records) == MOST_TOLD


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["json", "other", "empty", "missing", "text", "refused", "timeout", "closed"]),
        st.integers(0, 3), st.integers(0, 3), st.floats(0, 60),
    ),
    max_size=20,
)  # fmt: skip


@relaxed
@given(STEPS)
def test_any_sequence(steps: list[tuple[str, int, int, float]]) -> None:
    """After any sequence of answers and failures a scrape has each series once, and no mismatch of counts that are equal."""
    time = Time()
    watch = RasWatch(ADDRESS, INTERVAL, time)
    for kind, first, second, seconds in steps:
        time.now += seconds
        if kind == "json":
            watch.heard(two(first, second))
        elif kind == "other":
            watch.heard(two(first, second, name=OTHER, pids=(8000, 8001)))
        elif kind == "empty":
            watch.heard(parse_json(document()))
        elif kind == "missing":
            watch.heard(parse_json(document(communicator([rank(0)], [missing(1)]))))
        elif kind == "text":
            watch.heard(parse_text(text("0 1 1 2 2 2 RUNNING OK")))
        else:
            watch.failed(RasError(kind, "nothing"))
        view = watch.view()
        samples(view)
        for seen in view.communicators:
            ranges = seen.communicator.ranges.values()
            assert (seen.state in {"mismatch", "frozen mismatch"}) == (
                seen.state != "incomplete" and any(low != high for low, high in ranges)
            )
            assert 0 <= seen.age_seconds <= KEPT_INTERVALS * INTERVAL + seconds


def polled(watch: NcclWatch) -> None:
    asyncio.run(watch.poll(watch.ports[0]))


def test_fault_of_ours(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    """An error that nobody thought of is logged and counted, and the watch goes on."""

    async def broken(_: RasAddress) -> Answer:
        raise ZeroDivisionError

    watch = NcclWatch([ADDRESS], INTERVAL, time, broken)
    polled(watch)

    assert watch.views()[0].failures == {"fault": 1}
    assert "ZeroDivisionError" in caplog.text


def test_off(time: Time) -> None:
    """Off asks nobody and says so."""
    watch = NcclWatch([], INTERVAL, time)

    assert (watch.views(), watch.health()) == ((), {"enabled": False, "ports": []})


def test_in_the_background(time: Time) -> None:
    """While it runs, a port is asked by a task of its own; afterwards nothing is left of it."""
    port = FakeRas()

    async def live() -> tuple[dict[str, object], int]:
        answered = asyncio.Event()

        async def asking(address: RasAddress) -> Answer:
            try:
                return await ask(address)
            finally:
                answered.set()

        async with port.listening():
            watch = NcclWatch([port.address], INTERVAL, time, asking)
            before = asyncio.all_tasks()
            async with watch.running():
                (task,) = asyncio.all_tasks() - before
                await answered.wait()
            assert task.cancelled()
            return watch.ports[0].health(), port.connections

    health, connections = asyncio.run(live())

    assert (health["up"], health["nccl_version"], health["reason"], connections) == (True, "2.29.1", None, 1)
