"""
Which requests a finding is about, as far as the ranks' tables of drifting requests tell.

A table comes up to a second after the step records, and holds the requests of the batch that was decided on last.
"""

from collections.abc import Iterator, Sequence

from rankscope_exporter.contract import RequestRow
from rankscope_server.domain.facts import RankFacts

REQUESTS_NAMED = 8
"""
Requests that a finding names at most.
"""

SHORT_CHARACTERS = 4
"""
Last characters of an id that a sentence shows.
"""


def short_request(request_id: str) -> str:
    """
    A request in a sentence: `...07f2`; a short id as it is.
    """
    return request_id if len(request_id) <= 2 * SHORT_CHARACTERS else f"...{request_id[-SHORT_CHARACTERS:]}"


def masked_requests(ranks: Sequence[RankFacts], step: int, reach: int) -> tuple[str, ...]:
    """
    Requests that a rank masked at `step` because they drift, the worst first; empty where it is not known which.

    A table of a later step still tells, if it is of the same batch: that one comes round every `reach` steps.
    """
    rows = [
        row
        for row in _rows(ranks)
        if row.masked and row.first_drift_step <= step <= row.step and (row.step - step) % reach == 0
    ]
    return _named(sorted(rows, key=lambda row: (-row.drift, row.request_id)))


def drifting_requests(ranks: Sequence[RankFacts], step: int) -> tuple[str, ...]:
    """
    Requests that have drifted since `step` or later, those that drift for longest first.
    """
    rows = [row for row in _rows(ranks) if row.step >= step]
    return _named(sorted(rows, key=lambda row: (row.first_drift_step, -row.drift, row.request_id)))


def first_request(ranks: Sequence[RankFacts], step: int) -> str:
    """
    The request with which the drift began that was found at `step`; empty where it is not known: it may have ended since.
    """
    rows = [row for row in _rows(ranks) if 0 < row.first_drift_step <= step <= row.step]
    return min(rows, key=lambda row: (row.first_drift_step, -row.drift, row.request_id)).request_id if rows else ""


def _rows(ranks: Sequence[RankFacts]) -> Iterator[RequestRow]:
    """
    Rows of requests that drift and have a name. Those of V2 are about lengths on the host, which mean nothing.
    """
    for rank in ranks:
        if rank.requests is not None and not rank.is_v2:
            yield from (row for row in rank.requests.rows if row.drift > 0 and row.request_id)


def _named(rows: Sequence[RequestRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.request_id for row in rows))[:REQUESTS_NAMED]
