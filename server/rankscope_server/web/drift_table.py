"""
The table behind the drift chart.
"""

from dataclasses import dataclass

from rankscope_server.domain.model import Series

TABLE_PERIOD_SECONDS = 5
TABLE_ROWS = 24


@dataclass(frozen=True, slots=True)
class DriftTable:
    """
    Drift per rank at whole multiples of the period, newest first.
    """

    labels: tuple[str, ...]
    rows: tuple[tuple[float, tuple[float | None, ...]], ...]
    """Start of the period (Unix seconds) and the largest value of each rank in it."""


def tabulate_drift(series: Series, *, period: int = TABLE_PERIOD_SECONDS, rows: int = TABLE_ROWS) -> DriftTable:
    """
    Put the series into periods that are over; the one that runs is left out, so that a row never changes once shown.
    """
    periods: dict[int, list[float | None]] = {}
    for index, at in enumerate(series.times_unix):
        largest = periods.setdefault(int(at // period), [None] * len(series.labels))
        for rank, values in enumerate(series.values):
            value = values[index]
            if value is not None and (largest[rank] is None or value > (largest[rank] or 0)):
                largest[rank] = value
    if periods:
        del periods[max(periods)]
    newest = sorted(periods.items(), reverse=True)[:rows]
    return DriftTable(tuple(series.labels), tuple((float(number * period), tuple(values)) for number, values in newest))
