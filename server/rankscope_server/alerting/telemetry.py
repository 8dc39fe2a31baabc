"""
Metrics of alerts and their receivers, built at each scrape.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankscope_server.alerting.desk import AlertDesk
from rankscope_server.domain.alert import AlertState
from rankscope_server.domain.model import Severity


class AlertCollector(Collector):
    """
    What fires, and whether receivers hear of it.
    """

    def __init__(self, desk: AlertDesk) -> None:
        self._desk = desk

    def describe(self) -> list[Metric]:
        """
        Nothing: what there is is told at the scrape.
        """
        return []

    def collect(self) -> Iterator[Metric]:
        """
        The samples of now.
        """
        alerts = GaugeMetricFamily(
            "rankscope_server_alerts", "Alerts that are pending or firing.", labels=["state", "severity"]
        )
        counts = Counter((alert.state, alert.severity) for alert in self._desk.active())
        for state in (AlertState.PENDING, AlertState.FIRING):
            for severity in Severity:
                alerts.add_metric([state.value, severity.value], counts[state, severity])
        yield alerts
        labels = ["receiver", "kind"]
        delivered = CounterMetricFamily(
            "rankscope_server_notifications_delivered", "Notifications that a receiver took.", labels=labels
        )
        failed = CounterMetricFamily(
            "rankscope_server_notifications_failed", "Attempts to send to a receiver that failed.", labels=labels
        )
        given_up = CounterMetricFamily(
            "rankscope_server_notifications_given_up",
            "Notifications that a receiver did not take in time and will not get any more.",
            labels=labels,
        )
        waiting = GaugeMetricFamily(
            "rankscope_server_notifications_waiting", "Notifications that a receiver has not taken yet.", labels=labels
        )
        spent = CounterMetricFamily(
            "rankscope_server_notification_seconds",
            "Time from the hand-over of a notification to its delivery, over all that were delivered.",
            labels=labels,
        )
        up = GaugeMetricFamily(
            "rankscope_server_receiver_up",
            "Whether a receiver took what was sent last; absent while nothing was sent.",
            labels=labels,
        )
        for channel in self._desk.channels.values():
            view = channel.view()
            own = [view.name, view.kind]
            delivered.add_metric(own, view.delivered)
            failed.add_metric(own, channel.failed)
            given_up.add_metric(own, view.given_up)
            waiting.add_metric(own, view.waiting)
            spent.add_metric(own, channel.seconds)
            if view.healthy is not None:
                up.add_metric(own, 1 if view.healthy else 0)
        yield from (delivered, failed, given_up, waiting, spent, up)
