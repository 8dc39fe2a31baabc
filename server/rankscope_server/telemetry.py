"""
The server's own metrics, built at each scrape on a registry of their own.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankscope_server import __version__
from rankscope_server.control.board import Board
from rankscope_server.domain.model import FindingKind
from rankscope_server.ingest.poller import Poller


class ServerCollector(Collector):
    """
    How polling goes, and what was found.
    """

    def __init__(self, board: Board, pollers: Sequence[Poller]) -> None:
        self._board = board
        self._pollers = pollers

    def describe(self) -> list[Metric]:
        """
        Nothing: what there is is told at the scrape.
        """
        return []

    def collect(self) -> Iterator[Metric]:
        """
        The samples of now.
        """
        info = GaugeMetricFamily("rankscope_server_info", "The server's version; always 1.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        polls = CounterMetricFamily(
            "rankscope_server_polls", "Questions to an exporter.", labels=["deployment", "exporter", "path"]
        )
        failures = CounterMetricFamily(
            "rankscope_server_poll_failures",
            "Questions to an exporter that were not answered, or not well.",
            labels=["deployment", "exporter", "path"],
        )
        spent = CounterMetricFamily(
            "rankscope_server_poll_seconds",
            "Time that an exporter's answers took, until they were taken in.",
            labels=["deployment", "exporter"],
        )
        up = GaugeMetricFamily(
            "rankscope_server_exporter_reached",
            "Whether an exporter's last answers are fresh.",
            labels=["deployment", "exporter"],
        )
        ranks = GaugeMetricFamily(
            "rankscope_server_ranks", "Ranks that an exporter speaks of.", labels=["deployment", "exporter"]
        )
        lost = CounterMetricFamily(
            "rankscope_server_steps_lost",
            "Steps that a rank's ring no longer held when the server came to ask for them.",
            labels=["deployment", "exporter"],
        )
        now = self._board.clock.now()
        for poller in self._pollers:
            track = poller.track
            own = [track.deployment, track.url]
            for path, count in sorted(poller.counts.polls.items()):
                polls.add_metric([*own, path], count)
                failures.add_metric([*own, path], poller.counts.failures.get(path, 0))
            spent.add_metric(own, poller.counts.seconds)
            up.add_metric(own, 0 if track.facts().out_of_reach(now) else 1)
            ranks.add_metric(own, len(track.ranks))
            lost.add_metric(own, track.lost)
        yield from (polls, failures, spent, up, ranks, lost)
        found = GaugeMetricFamily(
            "rankscope_server_findings_open", "Findings that are open.", labels=["deployment", "kind"]
        )
        counts = self._board.open_findings()
        for deployment in sorted(self._board.roles):
            for kind in FindingKind:
                found.add_metric([deployment, kind.value], counts.get((deployment, kind), 0))
        yield found
        yield GaugeMetricFamily(
            "rankscope_server_problems",
            "Things that are wrong with the server itself.",
            value=len(self._board.all_problems()),
        )
