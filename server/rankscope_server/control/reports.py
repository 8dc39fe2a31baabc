"""
What is made of findings: a forecast, an incident, alerts.
"""

from collections.abc import Sequence

from rankscope_server.alerting.desk import AlertDesk, EngineLook
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, ExporterFacts
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.forecast import assess_forecast
from rankscope_server.domain.outlook import UNFORESEEN, Forecast
from rankscope_server.domain.state import current_findings
from rankscope_server.incidents.desk import IncidentDesk
from rankscope_server.store import Store
from rankscope_server.store.alerts import AlertStore

FORECAST_SECONDS = 1.0
"""
A forecast is made anew when it is older than this.
"""


class Reports:
    """
    Follows every engine from look to look. One event loop owns it.
    """

    def __init__(self, incidents: IncidentDesk, alerts: AlertDesk, deployments: Sequence[str]) -> None:
        self.incidents = incidents
        self.alerts = alerts
        self._deployments = tuple(deployments)
        self._forecasts: dict[tuple[str, str], tuple[float, Forecast]] = {}
        self._incidents_restored = self._alerts_restored = False

    def observe(
        self,
        deployment: str,
        engines: Sequence[tuple[EngineFacts, EngineMemory]],
        exporters: Sequence[ExporterFacts],
        now: Moment,
    ) -> None:
        """
        Take in what a look at a deployment has found: all its engines, and all its exporters.
        """
        looks = []
        for engine, memory in engines:
            self.incidents.observe(engine, memory, now)
            forecast = self._foresee(engine, now)
            incident = self.incidents.open_on(deployment, engine.engine)
            looks.append(EngineLook(engine, current_findings(engine, memory), forecast, incident))
        known = {engine.engine for engine, _ in engines}
        if all(exporter.reached(now) for exporter in exporters):
            self.incidents.absent(deployment, known, now)
        for key in [key for key in self._forecasts if key[0] == deployment and key[1] not in known]:
            del self._forecasts[key]
        self.alerts.observe(deployment, looks, exporters, now)

    def _foresee(self, engine: EngineFacts, now: Moment) -> Forecast:
        key = (engine.deployment, engine.engine)
        made = self._forecasts.get(key)
        if made is None or now.monotonic - made[0] >= FORECAST_SECONDS:
            made = self._forecasts[key] = (now.monotonic, assess_forecast(engine, now))
        return made[1]

    def forecast(self, deployment: str, engine: str) -> Forecast:
        """
        The last forecast for an engine.
        """
        made = self._forecasts.get((deployment, engine))
        return UNFORESEEN if made is None else made[1]

    def problems(self) -> tuple[str, ...]:
        """
        What keeps incidents and alerts from being kept or heard of, each with the remedy.
        """
        return (*filter(None, (self.incidents.problem,)), *self.alerts.problems())

    async def restore(self, store: Store) -> None:
        """
        Take back, once, what an earlier run of the server has left.

        Raises:
            StoreError: it cannot be read; what was read stays read, and the rest is tried again next time.

        """
        if not self._incidents_restored:
            await self.incidents.restore(store, self._deployments)
            self._incidents_restored = True
        if not self._alerts_restored:
            await self.alerts.restore(AlertStore(store))
            self._alerts_restored = True

    async def keep(self, store: Store | None) -> None:
        """
        Make the copies of flight records that are due, and put what has changed into the store, if there is one. Alerts
        are kept as they change, by their own loop.

        Raises:
            StoreError: something could not be read or put there; it is tried again next time.

        """
        if store is not None:
            await self.restore(store)
        await self.incidents.keep(store)
