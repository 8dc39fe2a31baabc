"""
Step records after a cursor: nothing twice, nothing lost, and what is in flight comes again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from rankscope_exporter.contract import Phase, StepsFrame
from rankscope_exporter.flight import FlightFile
from rankscope_exporter.flight.layout import STEP_DTYPE
from rankscope_exporter.serve.cursor import CursorError, decode_cursor, encode_cursor, rank_token
from rankscope_exporter.serve.steps import OVERLAP, RankSteps, assemble, settled_step

Make = Callable[..., Any]


def ask(client: TestClient, cursor: str | None = None) -> StepsFrame:
    answer = client.get("/v1/steps", params={} if cursor is None else {"cursor": cursor})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/vnd.rankscope.steps"
    return StepsFrame.decode(answer.content)


def steps_of(frame: StepsFrame) -> list[list[int]]:
    return [records["step"].tolist() for records in frame.records]


def test_cursor_round_trip() -> None:
    """A cursor holds a step for each rank."""
    steps = {rank_token("a"): 0, rank_token("b"): 2**40}

    assert decode_cursor(encode_cursor(steps)) == steps
    assert decode_cursor(encode_cursor({})) == {}


@pytest.mark.parametrize(
    "text",
    ["x", "AAAA", "%%%", "é", encode_cursor({rank_token("a"): 7})[:-2], encode_cursor({rank_token("a"): 7}) + "AAAA"],
)
def test_damaged_cursor(text: str, client: TestClient) -> None:
    """A damaged cursor is refused with the remedy."""
    with pytest.raises(CursorError):
        decode_cursor(text)

    answer = client.get("/v1/steps", params={"cursor": text})

    assert answer.status_code == 400
    assert "ask again without it" in answer.text


def test_flipped_cursor(client: TestClient) -> None:
    """No single changed character goes unnoticed."""
    good = encode_cursor({rank_token("a"): 7})
    for place in range(len(good)):
        changed = good[:place] + ("A" if good[place] != "A" else "B") + good[place + 1 :]
        # The last character has bits that stand for nothing.
        if place < len(good) - 1:
            with pytest.raises(CursorError):
                decode_cursor(changed)


def test_everything_then_what_is_new(client: TestClient, rank_file: Make) -> None:
    """Without a cursor all that the rings hold comes, with the cursor only what came after."""
    first, second = rank_file(0), rank_file(1)
    first.steps(5)
    second.steps(4)

    frame = ask(client)
    assert steps_of(frame) == [[1, 2, 3, 4, 5], [1, 2, 3, 4]]
    assert [(rank.pp_rank, rank.records, rank.lost) for rank in frame.header.ranks] == [(0, 5, 0), (1, 4, 0)]

    first.step(6)
    frame = ask(client, frame.header.cursor)
    assert steps_of(frame) == [[6], []]
    assert steps_of(ask(client, frame.header.cursor)) == [[], []]


def test_in_flight_comes_again(client: TestClient, rank_file: Make) -> None:
    """A record in flight comes with each answer, and once more when it is done."""
    rank = rank_file(0)
    rank.steps(2)
    rank.step(3, Phase.SCHEDULED)

    frame = ask(client)
    assert steps_of(frame) == [[1, 2, 3]]
    frame = ask(client, frame.header.cursor)
    assert (steps_of(frame), frame.records[0]["phase"].tolist()) == ([[3]], [Phase.SCHEDULED])

    rank.step(3, Phase.DECIDED)
    frame = ask(client, frame.header.cursor)
    assert frame.records[0]["phase"].tolist() == [Phase.DECIDED]

    rank.step(3)
    rank.step(4, Phase.STATE_UPDATED)
    frame = ask(client, frame.header.cursor)
    assert frame.records[0]["phase"].tolist() == [Phase.DONE, Phase.STATE_UPDATED]


def test_new_rank_with_an_old_cursor(client: TestClient, rank_file: Make) -> None:
    """A rank that the cursor does not know comes from its beginning."""
    rank_file(0).steps(2)
    cursor = ask(client).header.cursor
    rank_file(1).steps(2)

    assert steps_of(ask(client, cursor)) == [[], [1, 2]]


def test_lost(client: TestClient, rank_file: Make) -> None:
    """Steps that the ring overwrote since the cursor are counted."""
    rank = rank_file(0)
    rank.steps(10)
    cursor = ask(client).header.cursor
    for step in range(11, 111):
        rank.step(step)

    frame = ask(client, cursor)

    assert (frame.header.ranks[0].lost, frame.header.ranks[0].records) == (36, 64)


def test_file_made_anew(client: TestClient, rank_file: Make) -> None:
    """A file that was made anew under its old name starts from its beginning."""
    old = rank_file(0)
    old.steps(9)
    cursor = ask(client).header.cursor
    old.path.unlink()
    rank_file(0).steps(3)

    assert steps_of(ask(client, cursor)) == [[1, 2, 3]]


def test_backlog_comes_in_pieces(rank_file: Make) -> None:
    """A backlog larger than an answer comes oldest first over several answers; a first answer holds the newest."""
    rank = rank_file(0, capacity=1024)
    rank.steps(100)
    with FlightFile(rank.path) as file:
        ranks = [RankSteps(file, rank.identity, "running")]  # type: ignore[arg-type]

        def get(cursor: str | None) -> StepsFrame:
            return assemble(ranks, cursor, node="n", monotonic_ns=1, unix=1.0, answer_records=0)

        cursor = get(None).header.cursor
        for step in range(101, 401):
            rank.step(step)
        seen: list[int] = []
        for _ in range(3):
            frame = get(cursor)
            cursor = frame.header.cursor
            seen += frame.records[0]["step"].tolist()
        first = get(None).records[0]["step"].tolist()

    assert seen == list(range(101, 401))
    assert first == list(range(273, 401))


def records(*phases: Phase, first: int = 1) -> Any:
    array = np.zeros(len(phases), STEP_DTYPE)
    array["step"] = range(first, first + len(phases))
    array["phase"] = phases
    return array


def test_settled() -> None:
    """The cursor stops before the first record in flight."""
    assert settled_step(records(Phase.DONE, Phase.DECIDED, Phase.SCHEDULED), 0, 3) == 1
    assert settled_step(records(Phase.DONE, Phase.DONE), 0, 2) == 2
    assert settled_step(records(), 7, 9) == 7
    assert settled_step(records(Phase.SCHEDULED, first=8), 7, 8) == 7


def test_settled_past_an_abandoned_step() -> None:
    """A step that ended in an error never gets done; it does not hold the cursor for ever."""
    abandoned = records(Phase.DONE, Phase.SCHEDULED, *[Phase.DONE] * OVERLAP)

    assert settled_step(abandoned[:-1], 0, OVERLAP + 1) == 1
    assert settled_step(abandoned, 0, OVERLAP + 2) == OVERLAP + 2


def test_settled_past_a_failed_step() -> None:
    """A step that an error ended will not change any more, and is not sent again."""
    failed = records(Phase.DONE, Phase.DECIDED)
    failed["failed"][1] = 1

    assert settled_step(failed, 0, 2) == 2
