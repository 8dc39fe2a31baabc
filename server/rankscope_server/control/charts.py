"""
Series for charts: the last hour from memory, what is before it from the store.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rankscope_server.domain.facts import rank_labels
from rankscope_server.domain.model import Series
from rankscope_server.ingest.tracks import RankTrack
from rankscope_server.store import SampleRow

MAX_SPAN_SECONDS = 31 * 86400


def clamp_span(since_unix: float, until_unix: float, now_unix: float) -> tuple[int, int]:
    """
    Whole seconds of a time span that a chart may ask for: none in the future, none absurdly far back.
    """
    until = int(min(max(until_unix, 0.0), now_unix))
    since = int(max(min(since_unix, float(until)), until - MAX_SPAN_SECONDS, 0.0))
    return since, until


def build_series(
    tracks: Sequence[RankTrack], stored: Sequence[SampleRow], since: int, until: int, max_points: int
) -> Series:
    """
    Largest drift per rank from second `since` up to `until`, not including it, in at most `max_points` points.

    A point stands for as many seconds as it must, and is the largest value in them: a peak is never lost.
    """
    ids = sorted(
        {track.id for track in tracks} | {row.rank for row in stored},
        key=lambda rank: (rank.dp_rank, rank.pp_rank, rank.tp_rank),
    )
    span = until - since
    if not ids or span <= 0:
        return Series()
    width = -(-span // max(1, max_points))
    # Points begin at multiples of their width: a chart that asks again gets the same points.
    first = since // width * width
    points = -(-(until - first) // width)
    values = np.full((len(ids), points), -np.inf)
    rows = {rank: row for row, rank in enumerate(ids)}
    if stored:
        columns = np.array([(row.second - first) // width for row in stored])
        np.maximum.at(
            values,
            (np.array([rows[row.rank] for row in stored]), columns),
            np.array([row.drift_max for row in stored], float),
        )
    for track in tracks:
        begin = max(since, track.seconds.first)
        if track.seconds.first and begin < until:
            wanted = np.arange(begin, min(until, track.seconds.last + 1), dtype=np.int64)
            drift = track.seconds.drift(wanted)
            known = ~np.isnan(drift)
            np.maximum.at(values[rows[track.id]], (wanted[known] - first) // width, drift[known])
    times = [float(first + point * width) for point in range(points)]
    return Series(times, list(rank_labels(ids)), [_listed(row) for row in values])


def _listed(row: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if value == -np.inf else float(value) for value in row]
