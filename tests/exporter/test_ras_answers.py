"""
Reading what NCCL's RAS port answers, in each of its formats.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_ras import HASH, communicator, document, missing, rank, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope_exporter.collectors.nccl import Communicator, NcclRank, assess_communicator
from rankscope_exporter.serve.ras_answer import (
    MAX_COMMUNICATORS,
    MAX_RANKS,
    Answer,
    CutShortError,
    RasError,
    UnknownFormatError,
)
from rankscope_exporter.serve.ras_json import parse_json
from rankscope_exporter.serve.ras_text import MAX_LINES, parse_text

GOLDEN = Path(__file__).parent / "golden"
relaxed = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
WHERE = "GPU {0} managed by process 700{0} on node 10.1.2.3"


def only(answer: Answer) -> Communicator:
    (found,) = answer.communicators
    return found


def test_real_answers() -> None:
    """What NCCL 2.28.9 said on a GPU, of two communicators of one rank each, is read in both formats alike."""
    in_json = parse_json((GOLDEN / "ras-2.28.9.json").read_text())
    in_text = parse_text((GOLDEN / "ras-2.28.9.txt").read_text())

    assert in_json.nccl_version == in_text.nccl_version == "2.28.9"
    assert in_json.summary == in_text.summary == {("running", "ok"): 2}
    assert [c.id for c in in_json.communicators] == ["16d8c577c922a34b", "a4dbd7df48ede1b7"]
    assert in_json.processes == {("192.0.2.2", 484)}


def test_json_of_a_healthy_job() -> None:
    """Every rank has its counts, its process and its device; a hash is written with all 16 digits."""
    ranks = [rank(0, counts={"AllReduce": 12, "Broadcast": 3}), rank(1, counts={"AllReduce": 12, "Broadcast": 3})]

    answer = parse_json(document(communicator(ranks)))

    found = only(answer)
    assert (answer.nccl_version, answer.format, answer.summary) == ("2.29.1", "json", {("running", "ok"): 1})
    assert (found.id, found.size, found.status, found.errors, found.missing) == (HASH, 2, "running", "ok", 0)
    assert [(r.rank, r.host, r.pid, r.cuda_device, r.state) for r in found.ranks] == [
        (0, "10.1.2.3", 7000, 0, "running"),
        (1, "10.1.2.3", 7001, 1, "running"),
    ]
    assert found.ranks[1].counts == {"Broadcast": 3, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 12}
    assert answer.processes == {("10.1.2.3", 7000), ("10.1.2.3", 7001)}


def test_json_of_a_mismatch() -> None:
    """Ranks whose counts differ are a mismatch; the range says by how much, by type."""
    found = only(
        parse_json(document(communicator([rank(0, counts={"Broadcast": 8}), rank(1, counts={"Broadcast": 7})])))
    )

    assert (found.errors, found.ranges["Broadcast"], found.ranges["AllReduce"]) == ("mismatch", (7, 8), (0, 0))


@pytest.mark.parametrize(
    ("absent", "state", "errors"),
    [
        (missing(1), "unresponsive", "incomplete"),
        (missing(1, dead=True), "dead", "incomplete"),
        (missing(1, unresponsive=False), "not a member", "mismatch"),
    ],
)
def test_json_of_missing_ranks(absent: dict[str, Any], state: str, errors: str) -> None:
    """A rank without data is told from one that answers and has left the communicator."""
    found = only(parse_json(document(communicator([rank(0)], [absent]))))

    assert (found.missing, found.ranks[1].state, found.errors) == (1, state, errors)


def test_json_of_unlisted_ranks() -> None:
    """Ranks that a communicator has by its size and that are listed nowhere are missing."""
    found = only(parse_json(document(communicator([rank(0)], size=4))))

    assert (found.missing, found.incomplete) == (3, True)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"abort_flag": True}, "abort"),
        ({"destroy_flag": True}, "finalize"),
        ({"finalize_called": True}, "finalize"),
        ({"init_state": 7}, "init"),
    ],
)
def test_json_status(changes: dict[str, Any], state: str) -> None:
    """The flags of a rank make its state; ranks with different states are a mismatch."""
    found = only(parse_json(document(communicator([rank(0, **changes), rank(1)]))))

    assert (found.ranks[0].state, found.ranks[0].errors, found.mismatch) == (state, (), True)


def test_json_errors() -> None:
    """Results that are errors are named; success and work in progress are none."""
    found = only(parse_json(document(communicator([rank(0, init_state=2, async_error=6), rank(1, async_error=42)]))))

    assert [r.errors for r in found.ranks] == [
        (("init", "system error"), ("async", "remote process error")),
        (("async", "unexpected error"),),
    ]
    assert "error" in found.errors


def test_json_with_the_comma_that_is_forgotten() -> None:
    """NCCL 2.28.9 forgets a comma in each missing rank; that answer is read all the same."""
    whole = document(communicator([rank(0)], [missing(1), missing(2)]), version="2.28.9")
    broken = re.sub(r'("nvml_dev": \d+),(\s+"status": \{\s+"unresponsive")', r"\1\2", whole)
    assert broken != whole

    assert parse_json(broken) == parse_json(whole)


def test_json_of_a_process_that_nobody_knows() -> None:
    """NCCL writes `unknown` and -1 where it does not know; that is left open, not shown as a host."""
    who = rank(0, host="unknown") | {"pid": -1}

    found = only(parse_json(document(communicator([who]))))

    assert (found.ranks[0].host, found.ranks[0].pid) == ("", None)


def test_json_fields_of_later_releases() -> None:
    """Fields and types of collectives that are new are no obstacle."""
    later = rank(0, counts={"AlltoAll": 5}) | {"progress": {"x": [1.5, None]}}

    found = only(parse_json(document(communicator([later]), version="2.40.0", extra=True)))

    assert found.ranks[0].counts["AlltoAll"] == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nccl_version": "two"}, "nccl_version"),
        ({"nccl_version": "2.29.1\x1b[31m"}, "nccl_version"),
        ({"communicators": {}}, "communicators"),
        ({"communicators": [7]}, "communicators[]"),
        ({"communicators": [communicator([rank(0)], hash="0xzz")]}, "hash"),
        ({"communicators": [communicator([rank(0), rank(0)])]}, "twice"),
        ({"communicators": [communicator([rank(0), rank(1)], size=1)]}, "more ranks than its size"),
        ({"communicators": [communicator([rank(0) | {"host": 'a"} 1'}])]}, "host"),
        ({"communicators": [communicator([rank(0) | {"pid": "12"}])]}, "pid"),
        ({"communicators": [communicator([rank(0) | {"rank": True}])]}, "rank"),
        ({"communicators": [communicator([rank(0) | {"status": {}}])]}, "init_state"),
        ({"communicators": [communicator([rank(0, counts={"All Reduce": 1})])]}, "collective_counts"),
        ({"communicators": [communicator([rank(0, counts={f"T{n}": 1 for n in range(20)})])]}, "collective_counts"),
        ({"communicators": [communicator([rank(0, counts={"AllReduce": 1 << 65})])]}, "AllReduce"),
        ({"communicators": [communicator([rank(0, counts={"AllReduce": 1.5})])]}, "AllReduce"),
    ],
)
def test_json_that_is_not_known(change: dict[str, Any], says: str) -> None:
    """A field of another type or form makes the answer unusable, and the message names it."""
    with pytest.raises(UnknownFormatError, match=re.escape(says)) as caught:
        parse_json(document(**change))

    assert caught.value.nccl_version in {"2.29.1", ""}


@pytest.mark.parametrize(
    "body", ["[" * 100_000, '{"a":' * 50_000, "9" * 100_000, '{"nccl_version": NaN}', "null", "[]", ""]
)
def test_hostile_json(body: str) -> None:
    """Depth, length and odd constants end in the same error."""
    with pytest.raises(RasError):
        parse_json(body)


@relaxed
@given(st.integers(1, 2000))
def test_json_cut_anywhere(at: int) -> None:
    """An answer that is cut is never read as a shorter one."""
    whole = document(communicator([rank(0), rank(1)], [missing(2)])).rstrip()
    at = min(at, len(whole) - 1)

    with pytest.raises(RasError) as caught:
        parse_json(whole[:at])

    assert caught.value.reason == "cut short"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@relaxed
@given(st.data())
def test_any_field_may_hold_anything(data: st.DataObject) -> None:
    """Whatever stands in a field, the answer is read or refused, and what is shown has plain labels."""
    whole = json.loads(document(communicator([rank(0), rank(1)], [missing(2)])))
    place: Any = whole
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            place[key] = data.draw(JSON)
            break
        place = place[key]
    try:
        answer = parse_json(json.dumps(whole))
    except UnknownFormatError:
        return
    for found in answer.communicators:
        assert re.fullmatch("[0-9a-f]{16}", found.id)
        assert all(re.fullmatch(r"[0-9A-Za-z.:%_-]*", r.host) for r in found.ranks)


def test_json_with_too_much() -> None:
    """Past the bounds communicators are counted and ranks left out; nothing grows with the answer."""
    many = [communicator([rank(0)], name=f"{n:016x}") for n in range(1, MAX_COMMUNICATORS + 11)]
    big = communicator([rank(n) for n in range(MAX_RANKS + 1)], name="f" * 16)

    answers = parse_json(document(*many)), parse_json(document(big))

    assert (len(answers[0].communicators), answers[0].left_out) == (MAX_COMMUNICATORS, 10)
    assert answers[0].summary == {("running", "ok"): MAX_COMMUNICATORS + 10}
    assert (only(answers[1]).ranks, only(answers[1]).size, answers[1].left_out) == ((), MAX_RANKS + 1, MAX_RANKS + 1)


def test_json_with_one_hash_twice() -> None:
    """Two communicators with one hash would be two series of one name: the second is left out, and counted."""
    answer = parse_json(document(communicator([rank(0)]), communicator([rank(0), rank(1)])))

    assert (len(answer.communicators), answer.left_out, answer.summary) == (1, 2, {("running", "ok"): 2})


def test_text_of_a_healthy_job() -> None:
    """The text counts communicators and names none."""
    answer = parse_text(text("0 2 1 2 2 4 RUNNING OK\n1 1 1 1 1 1 INIT OK"))

    assert (answer.nccl_version, answer.format, answer.communicators) == ("2.27.5", "text", ())
    assert answer.summary == {("running", "ok"): 2, ("init", "ok"): 1}


def test_text_without_communicators() -> None:
    """A job that has no communicator yet is no unknown format, in either wording."""
    late = text("").replace(
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n    #  in group  per comm  per node  per comm  in group\n",
        "No communicator data collected!\n",
    )
    early = text("").replace("in group\n\nErrors", "in group\nNo communicator data collected!\n\nErrors")

    assert [parse_text(body).summary for body in (late, early)] == [{}, {}]


def test_text_of_a_mismatch_by_type() -> None:
    """From 2.26 on the text tells counts by type, of the ranks that stand out."""
    body = text(
        "0 1 1 2 2 2 RUNNING MISMATCH",
        warnings=f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different Broadcast operation counts\n"
        f"  Rank 1 has launched up to operation 8 -- {WHERE.format(1)}\n"
        f"  Rank 0 has not launched any operations -- {WHERE.format(0)}\n\n",
    )

    found = only(parse_text(body))

    assert (found.id, found.size, found.status, found.errors, found.ranges) == (HASH, 2, "running", "mismatch", {"Broadcast": (0, 8)})  # fmt: skip
    assert found.ranks == (
        NcclRank(0, "10.1.2.3", 7000, 0, None, {"Broadcast": 0}),
        NcclRank(1, "10.1.2.3", 7001, 1, None, {"Broadcast": 8}),
    )


def test_text_of_a_mismatch_over_all_types() -> None:
    """2.24 and 2.25 count all types together, and list the ranks of a group below its count."""
    body = text(
        "0 1 1 8 8 8 RUNNING MISMATCH",
        warnings=f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different collective operation counts\n"
        "  6 ranks have launched up to operation 41\n  2 ranks have launched up to operation 40\n"
        f"  Rank 2 -- {WHERE.format(2)}\n  Rank 5 -- [process information not found]\n\n",
        version="2.24.3",
    )

    found = only(parse_text(body))

    assert found.ranges == {"all": (40, 41)}
    assert [(r.rank, r.pid, r.counts) for r in found.ranks] == [(2, 7002, {"all": 40}), (5, None, {"all": 40})]


@pytest.mark.parametrize(
    ("lines", "version"),
    [(f"  Rank 1 -- {WHERE.format(1)}\n", "2.27.5"), ("  The missing rank: 1\n", "2.24.3")],
)
def test_text_of_a_rank_that_does_not_answer(lines: str, version: str) -> None:
    """Missing ranks are counted, and named as the release names them."""
    body = text(
        "0 1 1 1 2 1 RUNNING INCOMPLETE",
        errors="INCOMPLETE\n  Missing communicator data from 1 job process\n  Process 7001 on node 10.1.2.3 managing GPU 1\n\n"
        f"#0-0 ({HASH}) INCOMPLETE\n  Missing communicator data from 1 rank\n{lines}\n",
        warnings="TIMEOUT\n  Encountered 2 communication timeouts while gathering communicator data\n\n",
        version=version,
    )

    found = only(parse_text(body))

    assert (found.errors, found.missing, [(r.rank, r.state) for r in found.ranks], found.fingerprint) == (
        "incomplete", 1, [(1, "unresponsive")], None,
    )  # fmt: skip


def test_text_of_a_dead_process() -> None:
    """Dead processes are told in a paragraph of their own."""
    body = text(
        "0 1 1 1 2 1 RUNNING INCOMPLETE",
        errors="DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n  Process 7001 on node 10.1.2.3 managing GPU 1 (NVML 3)\n\n"
        f"#0-0 ({HASH}) INCOMPLETE\n  Missing communicator data from 1 rank\n  Rank 1 -- GPU 1 (NVML 3) managed by process 7001 on node 10.1.2.3\n\n",
    )

    assert only(parse_text(body)).ranks[0].cuda_device == 1


def test_text_of_errors() -> None:
    """Errors are told by kind, one rank on its own line or several below their number."""
    body = text(
        "0 1 1 4 4 4 RUNNING ERROR,MISMATCH",
        errors=f"#0-0 ({HASH}) ERROR\n  Initialization error on 1 rank\n  Rank 0 reported System error -- {WHERE.format(0)}\n"
        f"  Asynchronous errors on 2 ranks\n  2 ranks reported Remote process error\n  Rank 1 -- {WHERE.format(1)}\n  Rank 2 -- {WHERE.format(2)}\n\n",
        warnings=f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different status\n  3 ranks have status RUNNING\n"
        f"  Rank 0 has status INIT -- {WHERE.format(0)}\n",
    )

    found = only(parse_text(body))

    assert {r.rank: r.errors for r in found.ranks} == {
        0: (("init", "system error"),),
        1: (("async", "remote process error"),),
        2: (("async", "remote process error"),),
    }
    assert (found.error, found.mismatch, found.ranks[0].state) == (True, True, "init")


@pytest.mark.parametrize(
    "line", ["  2 ranks have status NOCOMM\n", "  2 ranks have status UNKNOWN\n  The unknown ranks: 1,3\n"]
)
def test_text_of_ranks_that_left(line: str) -> None:
    """Ranks that have left a communicator are missing from it."""
    body = text(
        "0 1 1 2 4 2 FINALIZE MISMATCH",
        warnings=f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different status\n{line}"
        f"  Rank 0 has status FINALIZE -- {WHERE.format(0)}\n  Rank 2 has status RUNNING -- {WHERE.format(2)}\n\n",
    )

    found = only(parse_text(body))

    assert (found.missing, found.status, {r.rank: r.state for r in found.ranks}[2]) == (2, "finalize", "running")


UNKNOWN_TEXTS = [
    ("NCCL version", "RCCL version"),
    ("compiled with CUDA", "compiled with"),
    ("Communicators...", "Communicateurs..."),
    ("Status  Errors", "Errors  Status"),
    ("RUNNING", "JOGGING"),
    ("MISMATCH\n\nErrors", "WORSE\n\nErrors"),
    ("different Broadcast operation counts", "a different number of operations"),
    ("has launched up to operation", "launched"),
    ("#0-0", "#3-0"),
    ("Errors\n======", "Errors\n~~~~~~"),
]


@pytest.mark.parametrize(("known", "other"), UNKNOWN_TEXTS)
def test_text_that_is_not_known(known: str, other: str) -> None:
    """A wording that is not known is not guessed at: the whole answer is unusable."""
    body = text(
        "0 1 1 2 2 2 RUNNING MISMATCH",
        warnings=f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different Broadcast operation counts\n"
        f"  Rank 1 has launched up to operation 8 -- {WHERE.format(1)}\n\n",
    )
    assert parse_text(body)
    assert known in body

    with pytest.raises(UnknownFormatError):
        parse_text(body.replace(known, other))


def test_text_with_too_much() -> None:
    """The number of lines is bounded."""
    with pytest.raises(RasError) as caught:
        parse_text(text("0 1 1 2 2 2 RUNNING OK", warnings="\n" * MAX_LINES))

    assert caught.value.reason == "too large"


def test_text_cut_short() -> None:
    """A text without its last heading, or without the end of its last line, is cut short."""
    body = text("0 1 1 2 2 2 RUNNING OK")
    for part in (body[: body.index("Warnings")], body[: body.index("Errors\n=")], body.rstrip()):
        with pytest.raises(CutShortError) as caught:
            parse_text(part)

        assert caught.value.nccl_version == "2.27.5"


WORDS = st.sampled_from([
    f"#0-0 ({HASH}) MISMATCH", f"#0-0 ({HASH}) ERROR", "  Communicator ranks have different status", "  3 ranks have status RUNNING",
    "  Communicator ranks have different AllReduce operation counts", "  2 ranks have launched up to operation 7", "INCOMPLETE",
    "  Rank 1 has not launched any operations -- [process information not found]", f"  Rank 1 -- {WHERE.format(1)}", "  Asynchronous error on 1 rank",
    "  2 ranks reported Internal error", "  The missing ranks: 1,2", "  The unknown ranks: 1,", "Warnings", "========", "Errors", "======", "",
])  # fmt: skip


@relaxed
@given(st.lists(WORDS | st.text(max_size=30), max_size=12))
def test_lines_in_any_order(lines: list[str]) -> None:
    """Known and unknown lines in any order are read or refused; nothing else happens."""
    body = text("0 1 1 2 4 4 RUNNING MISMATCH", warnings="".join(f"{line}\n" for line in lines))
    try:
        answer = parse_text(body)
    except RasError as error:
        assert error.reason in {"unknown format", "cut short"}  # noqa: PT017  # both outcomes are allowed
        return
    assert len(answer.communicators) <= 1


@relaxed
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: raw.decode("utf-8", "replace")))
def test_any_text(body: str) -> None:
    """No text whatever does more than raise the one error."""
    for parse in (parse_text, parse_json):
        with pytest.raises(RasError):
            parse(body)


BASE = Communicator("a" * 16, 2, "running")


@pytest.mark.parametrize(
    ("changes", "unchanged", "state"),
    [
        ({}, 500.0, "equal"),
        ({"mismatch": True}, 0.0, "mismatch"),
        ({"mismatch": True}, None, "mismatch"),
        ({"mismatch": True}, 30.0, "frozen mismatch"),
        ({"mismatch": True, "incomplete": True}, 30.0, "incomplete"),
        ({"mismatch": True, "incomplete": True, "error": True}, 30.0, "error"),
    ],
)
def test_states(changes: dict[str, bool], unchanged: float | None, state: str) -> None:
    """A mismatch is frozen once its counts stand still for long enough; errors and missing ranks are worse."""
    assert assess_communicator(replace(BASE, **changes), unchanged, 30.0) == state
