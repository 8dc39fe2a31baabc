"""
The account of steps that a soak keeps.
"""

import numpy as np
import numpy.typing as npt
import pytest
from accounts import Accounts, Fate
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.contract import Phase, RankLife
from rankscope_exporter.contract.http import StepsRank
from rankscope_exporter.flight.layout import STEP_DTYPE


def records(steps: list[int], *, unfinished: bool = False) -> npt.NDArray[np.void]:
    """Records of these steps, all done but the last one where that is `unfinished`."""
    made = np.zeros(len(steps), STEP_DTYPE)
    made["step"] = steps
    made["batch_hash"] = steps
    made["phase"] = Phase.DONE
    if unfinished:
        made["phase"][-1] = Phase.DECIDED
    return made


def head(count: int, *, lost: int = 0, key: str = "a", pp_rank: int = 0) -> StepsRank:
    """The head of a rank in an answer."""
    return StepsRank(
        key=key, engine="engine", dp_rank=0, pp_rank=pp_rank, tp_rank=0, life=RankLife.RUNNING, records=count, lost=lost
    )


def take(accounts: Accounts, steps: list[int], *, lost: int = 0, unfinished: bool = False, key: str = "a") -> None:
    """Take an answer that has these steps of one rank."""
    accounts.take(head(len(steps), lost=lost, key=key), records(steps, unfinished=unfinished))


def test_a_gap_that_was_reported_is_explained() -> None:
    """Steps before the first record count as lost where the header says so, and only as many as it says."""
    accounts = Accounts()
    take(accounts, [1, 2, 3])
    take(accounts, [10, 11], lost=6)
    assert accounts.total(Fate.LOST) == 6
    assert accounts.unexplained({"a": 11}) == {}
    take(accounts, [20, 21], lost=5)
    assert accounts.unexplained({"a": 21}) == {"a": 3}


def test_what_the_rank_did_and_nobody_sent_is_a_gap() -> None:
    """Steps beyond the last one received are unexplained, as are all steps of a rank that was never shown."""
    accounts = Accounts()
    take(accounts, [1, 2])
    assert accounts.unexplained({"a": 5, "b": 7}) == {"a": 3, "b": 7}


def test_a_rank_that_is_first_seen_late_has_a_gap() -> None:
    """Step ordinals begin with 1: what came before the first record of a new rank was not reported."""
    accounts = Accounts()
    take(accounts, [5, 6])
    assert accounts.unexplained({}) == {"a": 4}


def test_a_step_in_flight_is_done_once_it_comes_again() -> None:
    """A record that comes unfinished and then whole is done, and was not sent twice."""
    accounts = Accounts()
    take(accounts, [1, 2], unfinished=True)
    assert accounts.total(Fate.UNFINISHED) == 1
    take(accounts, [2, 3])
    assert (accounts.total(Fate.UNFINISHED), accounts.total(Fate.DONE)) == (0, 3)
    assert accounts.ranks["a"].sent_again_max == 0


def test_claims_that_contradict_what_was_received_are_noticed() -> None:
    """A step that came whole and is reported as lost, or comes whole again, is counted."""
    accounts = Accounts()
    take(accounts, [1, 2, 3])
    take(accounts, [2, 3, 4])
    take(accounts, [6], lost=2)
    rank = accounts.ranks["a"]
    assert (rank.sent_again_max, rank.lost_though_received) == (2, 1)
    assert rank.count(Fate.DONE) == 5


@pytest.mark.parametrize(("hashed", "different"), [(None, 0), (7, 1)])
def test_batches_of_two_ranks_are_compared_step_by_step(hashed: int | None, different: int) -> None:
    """Only steps that both ranks did are compared."""
    accounts = Accounts()
    take(accounts, [1, 2, 3])
    other = records([2, 3, 4])
    if hashed is not None:
        other["batch_hash"][0] = hashed
    accounts.take(head(3, key="b", pp_rank=1), other)
    assert accounts.different_batches() == (2, different)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=20))
def test_everything_sent_or_reported_leaves_no_gap(parts: list[tuple[int, int]]) -> None:
    """However many steps are lost before each answer, those received and those reported add up to all that there were."""
    accounts = Accounts()
    last = 0
    for lost, count in parts:
        first = last + lost + 1 if last else 1
        steps = list(range(first, first + count))
        take(accounts, steps, lost=lost if last else 0)
        last = steps[-1]
    assert accounts.unexplained({"a": last} if last else {}) == {}
    assert accounts.total(Fate.DONE) + accounts.total(Fate.LOST) == last
