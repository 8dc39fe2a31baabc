"""The step records that the server holds of a rank."""

import numpy as np
from made_ranks import made_record, made_records

from rankscope_exporter.contract import Phase
from rankscope_server.domain.alignment import tails
from rankscope_server.domain.history import StepHistory


def test_a_record_in_flight_is_replaced_when_it_is_done():
    """The same step comes again further on, and the later phase counts."""
    history = StepHistory()
    history.absorb(made_record(5, Phase.DECIDED))
    fresh = history.absorb(made_record(5))
    assert fresh["phase"].tolist() == [Phase.DONE]
    assert history.newest()["phase"] == Phase.DONE


def test_an_earlier_phase_never_replaces_a_later_one():
    """An answer that was overtaken by a later one changes nothing."""
    history = StepHistory()
    history.absorb(made_record(5))
    assert len(history.absorb(made_record(5, Phase.SCHEDULED))) == 0
    assert history.newest()["phase"] == Phase.DONE


def test_old_steps_give_way_and_are_not_mistaken_for_new_ones():
    """A slot that holds a newer step says that the older one is not there."""
    history = StepHistory(capacity=8)
    history.absorb(made_records(1, 20))
    assert history.take(np.array([12, 13, 20], np.uint64))["step"].tolist() == [0, 13, 20]
    assert len(history.absorb(made_record(3))) == 0


def test_records_that_cannot_be_are_left_out():
    """Step 0, unknown phases and absurd ordinals come from damaged memory."""
    history = StepHistory()
    bad = np.concatenate([made_record(0), made_record(7, phase=Phase.WRITING), made_record(6), made_record(4)])
    bad["step"][2] = 1 << 50
    assert history.absorb(bad)["step"].tolist() == [4]
    assert history.last == 4


def test_holes_are_left_out_of_the_tail():
    """Steps that no record came of are not made up."""
    history = StepHistory()
    history.absorb(np.concatenate([made_records(1, 3), made_records(6, 7)]))
    assert history.tail(5)["step"].tolist() == [3, 6, 7]


def test_tails_of_ranks_end_at_the_newest_step_of_each():
    """Each row by itself, with zeros where there is no record: before the first step, in holes, and for a rank without any."""
    histories = [StepHistory(capacity=8) for _ in range(3)]
    histories[0].absorb(made_records(1, 20))
    histories[1].absorb(np.concatenate([made_records(1, 1), made_records(3, 3)]))
    assert tails(histories, 5)["step"].tolist() == [[16, 17, 18, 19, 20], [0, 0, 1, 0, 3], [0, 0, 0, 0, 0]]
    assert tails(histories, 99)["step"].shape == (3, 8)
