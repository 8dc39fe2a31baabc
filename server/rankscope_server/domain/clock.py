"""
Time as a value: what wall and monotonic clock said at one moment.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """
    A moment by both clocks of the server. Ages and limits use the monotonic one, so that a clock jump opens no finding.
    """

    unix: float
    monotonic: float

    def unix_of(self, monotonic: float) -> float:
        """
        The wall-clock second of an earlier (or later) reading of the monotonic clock.
        """
        return self.unix + monotonic - self.monotonic


@dataclass(frozen=True, slots=True)
class NodeClock:
    """
    A node's clocks as its last answer gave them: translates the monotonic nanoseconds in its step records.
    """

    monotonic_ns: int
    unix: float
    received: float
    """Monotonic second of the server at which the answer arrived."""

    def unix_of(self, node_ns: int) -> float:
        """
        Wall-clock second, by the node, of a reading of the node's monotonic clock.
        """
        return self.unix + (node_ns - self.monotonic_ns) / 1e9

    def age_of(self, node_ns: int, now: Moment) -> float:
        """
        Seconds since a reading of the node's monotonic clock; never negative.
        """
        return max(0.0, (self.monotonic_ns - node_ns) / 1e9 + now.monotonic - self.received)
