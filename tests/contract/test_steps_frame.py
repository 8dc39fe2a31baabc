"""
The binary answer that the exporter gives and the dashboard server reads.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_exporter.contract import RankLife, StepsFrame, StepsHeader
from rankscope_exporter.contract.http import StepsRank
from rankscope_exporter.flight.layout import STEP_DTYPE


def frame(*counts: int) -> StepsFrame:
    """A frame with as many records per rank as given, each field with a value of its own."""
    bodies = []
    for rank, count in enumerate(counts):
        records = np.zeros(count, STEP_DTYPE)
        records["step"] = np.arange(1, count + 1)
        records["drift_sum"] = -rank
        records["phase"] = 4
        bodies.append(records)
    ranks = [
        StepsRank(
            key=f"k{i}", engine="e", dp_rank=0, pp_rank=i, tp_rank=0, life=RankLife.STOPPED, records=count, lost=i
        )
        for i, count in enumerate(counts)
    ]
    return StepsFrame(StepsHeader(node="n", monotonic_ns=5, unix=1.5, cursor="c", ranks=ranks), bodies)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4))
def test_round_trip(counts: list[int]) -> None:
    """What was encoded is decoded, rank by rank and field by field."""
    sent = frame(*counts)

    got = StepsFrame.decode(sent.encode())

    assert got.header == sent.header
    assert [records.tobytes() for records in got.records] == [records.tobytes() for records in sent.records]


@pytest.mark.parametrize("cut", [0, 7, 15, 20, 200, -1])
def test_cut_short(cut: int) -> None:
    """An answer that ends early is refused wherever it ends."""
    with pytest.raises(ValueError, match=r"\w"):
        StepsFrame.decode(frame(2, 1).encode()[:cut])


def test_of_another_version() -> None:
    """An answer of another version says what to do."""
    with pytest.raises(ValueError, match="upgrade the older one"):
        StepsFrame.decode(b"RSTEPS99" + frame(1).encode()[8:])


def test_record_of_another_size() -> None:
    """Records of another size are not cut into wrong ones."""
    data = bytearray(frame(1).encode())
    data[12] += 8

    with pytest.raises(ValueError, match="bytes where 216 were expected"):
        StepsFrame.decode(bytes(data))


def test_unknown_fields_of_a_newer_peer() -> None:
    """A header with fields that a newer exporter adds is read all the same."""
    sent = frame(1)
    head = sent.header.model_dump_json().encode()
    longer = head[:-1] + b',"later":1}'
    data = sent.encode().replace(head, longer)
    data = data[:8] + len(longer).to_bytes(4, "little") + data[12:]

    assert StepsFrame.decode(data).header == sent.header
