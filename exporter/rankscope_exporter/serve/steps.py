"""
Step records after a cursor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract import Phase, RankIdentity, RankLife, StepsFrame, StepsHeader
from rankscope_exporter.contract.http import StepsRank
from rankscope_exporter.flight import FlightError, FlightFile
from rankscope_exporter.serve.cursor import decode_cursor, encode_cursor, rank_token

ANSWER_RECORDS = 65536
"""
Most records in one answer (13 MB), shared evenly by the ranks; what is left comes with the next cursor.
"""
RANK_RECORDS = 128
"""
Records that each rank may have in an answer, however many ranks there are.
"""
OVERLAP = 8
"""
A record that is this far behind its rank's step and still neither done nor failed will not be any more.
"""


@dataclass(frozen=True, slots=True)
class RankSteps:
    """
    A rank whose records are asked for.
    """

    file: FlightFile
    identity: RankIdentity
    life: RankLife


def settled_step(records: npt.NDArray[np.void], after: int, last_step: int) -> int:
    """
    The last step that need not be sent again: no record up to it, of those sent, will change any more.
    """
    if not len(records):
        return after
    ended = (records["phase"] == Phase.DONE) | (records["failed"] > 0)
    unsettled = records["step"][~ended & (records["step"] + OVERLAP > last_step)]
    return max(after, int(unsettled[0]) - 1 if len(unsettled) else int(records["step"][-1]))


def assemble(
    ranks: Sequence[RankSteps],
    cursor: str | None,
    *,
    node: str,
    monotonic_ns: int,
    unix: float,
    answer_records: int = ANSWER_RECORDS,
) -> StepsFrame:
    """
    The answer to `/v1/steps`.

    With a cursor that knows a rank, the oldest records after it come first, and nothing is skipped that the ring still
    holds. Without one the newest come, as many as an answer takes.

    Raises:
        CursorError: the cursor is not one of ours.

    """
    known = decode_cursor(cursor) if cursor else {}
    limit = max(answer_records // max(len(ranks), 1), RANK_RECORDS)
    heads: list[StepsRank] = []
    bodies: list[npt.NDArray[np.void]] = []
    following: dict[bytes, int] = {}
    for rank in ranks:
        token = rank_token(rank.file.key)
        after = known.get(token)
        try:
            last_step = rank.file.step()
            if after is not None and after > last_step:  # the file was made anew under its old name
                after = None
            records = rank.file.records(after=after or 0)
        except FlightError:  # cut short since it was listed; the next listing tells of it
            if after is not None:
                following[token] = after
            continue
        records = records[-limit:] if after is None else records[:limit]
        following[token] = settled_step(records, after or 0, last_step)
        bodies.append(records)
        heads.append(
            StepsRank(
                key=rank.file.key,
                engine=rank.identity.engine,
                dp_rank=rank.identity.dp_rank,
                pp_rank=rank.identity.pp_rank,
                tp_rank=rank.identity.tp_rank,
                life=rank.life,
                records=len(records),
                lost=0 if after is None or not len(records) else int(records["step"][0]) - after - 1,
            )
        )
    header = StepsHeader(node=node, monotonic_ns=monotonic_ns, unix=unix, cursor=encode_cursor(following), ranks=heads)
    return StepsFrame(header, bodies)
