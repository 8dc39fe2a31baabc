"""
Which receivers hear of an alert.
"""

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_notice import Notice
from rankscope_server.domain.model import Severity


@dataclass(frozen=True, slots=True)
class Route:
    """
    What a receiver wants to hear of.
    """

    receiver: str
    severities: frozenset[Severity] = frozenset(Severity)
    deployments: frozenset[str] = frozenset()
    """Empty: of all of them. What concerns the server itself is for everybody."""

    def wants(self, notice: Notice) -> bool:
        """
        Whether an alert is for this receiver. A receiver that fails is for the others to hear of.
        """
        if notice.subject == self.receiver:
            return False
        of_it = not self.deployments or not notice.deployment or notice.deployment in self.deployments
        return of_it and notice.severity in self.severities


def plan_deliveries(notice: Notice, routes: Iterable[Route], told: Collection[str]) -> tuple[tuple[str, Notice], ...]:
    """
    Who is told what of a change: receivers that know of the alert hear of all that becomes of it, and of its end, whatever
    its severity is by then; others hear of it, as of a new one, once it is for them.
    """
    deliveries = []
    for route in routes:
        if route.receiver in told:
            deliveries.append((route.receiver, notice))
        elif notice.change is not Change.RESOLVED and route.wants(notice):
            first = dataclasses.replace(notice, change=Change.FIRING, before=None)
            deliveries.append((route.receiver, first))
    return tuple(deliveries)
