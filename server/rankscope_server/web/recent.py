"""
The stretch of time that the chart and its table show.
"""

from rankscope_server.domain.model import Series
from rankscope_server.domain.ports import Rankscope

WINDOW_SECONDS = 900
POINTS = 900


async def recent_series(rankscope: Rankscope, deployment: str, engine: str) -> Series:
    """
    Drift per rank over the last 15 minutes, from the first sample on.
    """
    now = int(rankscope.fleet().now_unix)
    return from_first_sample(await rankscope.series(deployment, engine, now - WINDOW_SECONDS, now + 1, POINTS))


def from_first_sample(series: Series) -> Series:
    """
    The series without the time before anything was known: a young engine fills the chart as an old one does.
    """
    known = range(len(series.times_unix))
    first = next((index for index in known if any(values[index] is not None for values in series.values)), None)
    if first is None:
        return Series([], list(series.labels), [[] for _ in series.labels])
    if first == 0:
        return series
    return Series(series.times_unix[first:], list(series.labels), [values[first:] for values in series.values])
