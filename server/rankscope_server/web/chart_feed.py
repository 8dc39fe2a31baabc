"""
What the chart of one stream needs: the whole series once, then what is new.
"""

from dataclasses import dataclass
from typing import Literal

from rankscope_server.domain.model import Series


@dataclass(frozen=True, slots=True)
class ChartEvent:
    """
    Points for the chart.
    """

    name: Literal["series", "points"]
    """`series` takes the place of everything, `points` are put behind what is there."""
    series: Series


class ChartFeed:
    """
    Remembers what one stream has sent.
    """

    def __init__(self) -> None:
        self._labels: list[str] | None = None
        self._last: tuple[float, list[float | None]] | None = None

    def advance(self, series: Series) -> ChartEvent | None:
        """
        What has to be sent so that the chart shows `series`; None if it does already.

        The newest point may still grow: it comes again, with the same time, when it has changed.
        """
        if self._labels != series.labels:
            self._labels, self._last = list(series.labels), None
            self._remember(series)
            return ChartEvent("series", series)
        if self._last is None:
            if not series.times_unix:
                return None
            self._remember(series)
            return ChartEvent("series", series)
        last_time, last_values = self._last
        start = next((index for index, at in enumerate(series.times_unix) if at >= last_time), None)
        if start is None:
            return None
        if series.times_unix[start] == last_time and [values[start] for values in series.values] == last_values:
            start += 1
        if start == len(series.times_unix):
            return None
        self._remember(series)
        return ChartEvent(
            "points",
            Series(series.times_unix[start:], list(series.labels), [values[start:] for values in series.values]),
        )

    def _remember(self, series: Series) -> None:
        if series.times_unix:
            self._last = (series.times_unix[-1], [values[-1] for values in series.values])
