"""Which engines have taken the place of others: what came up on a node after another had ended there."""

import numpy as np
import pytest
from made_ranks import START_UNIX, begin_ns, made_records, made_report

from rankscope_exporter.contract import RankLife, RanksAnswer, StepsFrame, StepsHeader
from rankscope_exporter.contract.http import StepsRank
from rankscope_server.domain.clock import Moment
from rankscope_server.ingest.tracks import ExporterTrack, Fleet

STEPS = 40
NODE_NS = begin_ns(STEPS + 50)
"""Monotonic clock of the node when it is asked: a second after the last step."""


def report(engine, pp_rank, *, age, life):
    return made_report(pp_rank, engine=engine, life=life, started_unix=START_UNIX - age)


def fleet_of(*reports):
    """A fleet of one exporter that speaks of these ranks, each of which took steps until a second ago."""
    track = ExporterTrack("chat", "http://a:9610", token=True, since=0.0)
    now = Moment(START_UNIX, 1000.0)
    answer = RanksAnswer(
        node="node-a", exporter_version="1", monotonic_ns=NODE_NS, unix=START_UNIX, flight_dir="/", control=True, ranks=list(reports), unreadable=[],
    )  # fmt: skip
    track.absorb_ranks(answer, now)
    heads = [
        StepsRank(
            key=one.key, engine=one.identity.engine, dp_rank=0, pp_rank=one.identity.pp_rank, tp_rank=0, life=one.life, records=STEPS, lost=0
        )
        for one in reports
    ]  # fmt: skip
    header = StepsHeader(node="node-a", monotonic_ns=NODE_NS, unix=START_UNIX, cursor="", ranks=heads)
    track.absorb_steps(StepsFrame(header, [np.asarray(made_records(1, STEPS)) for _ in heads]), now)
    fleet = Fleet()
    fleet.add(track)
    return fleet


@pytest.mark.parametrize("life", RankLife)
def test_an_engine_that_came_up_after_another_had_ended_takes_its_place(life):
    """Also if it has ended itself by now: what was replaced stays so."""
    engines = fleet_of(report("old", 0, age=500, life=RankLife.GONE), report("new", 0, age=0.5, life=life)).engines(
        "chat"
    )
    assert {engine.engine: engine.replaced for engine in engines} == {"old": True, "new": False}


def test_an_engine_beside_another_does_not_take_its_place():
    """It was there while the other still took steps, so that nothing has replaced what ended."""
    engines = fleet_of(
        report("one", 0, age=500, life=RankLife.GONE), report("two", 0, age=499, life=RankLife.RUNNING)
    ).engines("chat")
    assert not any(engine.replaced for engine in engines)
