"""What a rank did last, in words."""

import numpy as np
import pytest
from made_ranks import ManualClock, made_rank, made_record, made_records, made_report

from rankscope_exporter.contract import Guard, Phase, RankLife, Role
from rankscope_server.domain.words import last_did

NOW = ManualClock().now()
BEFORE = made_records(60, 71)


def said(records, peer=None, quiet=0.0, **report):
    rank = made_rank(records, made_report(1, **report), now=NOW, quiet=quiet)
    return last_did(rank, (rank, *([peer] if peer else [])), NOW)


def test_a_sender_that_never_came_back_says_whom_it_waits_for():
    """The receiver skipped: the sender stays in its broadcast."""
    peer = made_rank(made_records(60, 72, lambda s: {"masked": 8} if s == 72 else {}), made_report(0), now=NOW)
    records = np.concatenate([BEFORE, made_record(72, Phase.DECIDED, role=Role.SENDER)])
    assert said(records, peer, quiet=30) == "broadcast posted at step 72 and never left: waiting for pp0 (30 s)"


def test_a_receiver_that_skipped_and_went_on_says_so():
    """The skip is what matters, the next step is where it stands."""
    records = np.concatenate([BEFORE, made_record(72, masked=8), made_record(73, Phase.STATE_UPDATED)])
    assert said(records) == "skipped the collective at step 72 (all 8 requests masked), then began step 73"
    assert (
        said(records, quiet=9)
        == "skipped the collective at step 72 (all 8 requests masked), then began step 73 and never left it (9.0 s)"
    )


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (made_record(72, role=Role.SENDER), "sent the broadcast of step 72, step done"),
        (made_record(72, role=Role.RECEIVER), "took the broadcast of step 72, step done"),
        (made_record(72, guard=Guard.NONE), "finished step 72"),
        (
            made_record(72, requests=1, masked=1),
            "skipped the collective at step 72 (its only request masked), step done",
        ),
        (made_record(72, Phase.SCHEDULED), "entered step 72"),
        (made_record(72, Phase.STATE_UPDATED), "updated its requests in step 72, no decision yet"),
        (made_record(72, Phase.DECIDED, role=Role.SENDER), "posts the broadcast of step 72"),
    ],
)
def test_each_phase_has_its_words(record, sentence):
    """Said plainly, without an age while it is young."""
    assert said(np.concatenate([BEFORE, record])) == sentence


def test_a_process_that_is_gone_keeps_its_last_words():
    """What it did last, and that it ended."""
    assert said(BEFORE, life=RankLife.GONE) == "took the broadcast of step 71, step done; then its process ended"
    assert said(made_records(1, 0), life=RankLife.GONE) == "ended before its first step"
    assert said(made_records(1, 0)) == "has begun no step yet"
