"""
Receivers and a store of alerts that fail when a test says so, and a desk between them.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from made_ranks import ManualClock, made_engine, made_rank, made_records, made_report

from rankscope_server.alerting.desk import AlertDesk, EngineLook
from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_notice import Notice
from rankscope_server.domain.alert_routes import Route
from rankscope_server.domain.model import Finding, FindingKind, RankId, Severity
from rankscope_server.notify.receiver import DeliveryError
from rankscope_server.store import StoreError, schema
from rankscope_server.store.alerts import AlertStore

COMPILED: dict = {}
"""Statements that were compiled, for all stores of a run: that takes longer than what they do."""
RANK = made_rank(made_records(1, 3), made_report(), now=ManualClock().now())


class MadeReceiver:
    """A receiver that remembers what it took; `down` says whether it is reached."""

    kind = "webhook"
    where = "https://host.example/..."

    def __init__(self, name: str, *, batch: int = 1, remind_seconds: float | None = None) -> None:
        self.name = name
        self.batch = batch
        self.remind_seconds = remind_seconds
        self.down = False
        self.refuses: set[str] = set()
        """Alerts by name that it answers with a refusal."""
        self.took: list[Notice] = []

    async def send(self, notices: Sequence[Notice], now_unix: float) -> None:
        assert 0 < len(notices) <= self.batch
        if self.down:
            raise DeliveryError("connection refused", reached=False)
        if any(notice.name in self.refuses for notice in notices):
            raise DeliveryError("it answers 400", reached=True)
        self.took += notices

    async def close(self) -> None:
        pass

    def heard(self) -> dict[str, list[Change]]:
        """Changes by alert, each notice once, as a receiver sees them that knows ids that came twice."""
        seen: dict[str, Notice] = {}
        for notice in self.took:
            seen.setdefault(notice.id, notice)
        heard: dict[str, list[Change]] = {}
        for notice in seen.values():
            heard.setdefault(notice.alert, []).append(notice.change)
        return heard

    def firing(self) -> list[str]:
        """Names of alerts that fire, as far as it knows."""
        names = {notice.alert: notice.name for notice in self.took}
        return sorted(names[alert] for alert, changes in self.heard().items() if Change.RESOLVED not in changes)


class MadeStore:
    """The store's tables in memory, behind the same methods; `broken` says whether it can be written."""

    def __init__(self) -> None:
        self._engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool).execution_options(compiled_cache=COMPILED)
        for table in (schema.alerts, schema.notifications):
            table.create(self._engine)
        self.broken = False

    async def read(self, query):
        with self._engine.connect() as connection:
            return connection.execute(query).all()

    async def write(self, *statements):
        if self.broken:
            raise StoreError("store: the disk is full; make room on its disk")
        with self._engine.begin() as connection:
            for statement, values in statements:
                connection.execute(statement, values)

    def close(self) -> None:
        self._engine.dispose()


def made_finding(kind=FindingKind.DRIFT, severity=Severity.WARNING, sentence="pp0 counts too much") -> Finding:
    return Finding(kind, severity, sentence, 7, (RankId(0, 0, 0),), 1_700_000_000.0)


class MadeDesk:
    """A desk that looks at one engine, and does each of its steps when a test says so."""

    def __init__(self, clock: ManualClock, store: MadeStore | None, *receivers: MadeReceiver, routes=None) -> None:
        self.clock = clock
        self.store = store
        self.receivers = receivers
        self.findings: list[Finding] = []
        self.reached = True
        self.known = True
        pairs = [(r, (routes or {}).get(r.name, Route(r.name))) for r in receivers]
        self.desk = AlertDesk(pairs, clock, deployments={"chat"})
        self.desk.ledger.soon = self._soon

    async def _soon(self, write) -> None:
        self.desk.ledger.later(write)
        await self.desk.ledger.flush()

    async def restore(self) -> None:
        await self.desk.restore(AlertStore(self.store))

    def look(self) -> None:
        """One look at the engine."""
        now = self.clock.now()
        answered = now.monotonic if self.reached else now.monotonic - 60
        facts = made_engine(RANK, now=now, answered=answered, error="" if self.reached else "refused")
        looks = [EngineLook(facts, self.findings)] if self.known else []
        self.desk.observe("chat", looks, facts.exporters, now)
        self.desk.tick()

    async def dispatch(self) -> None:
        await self.desk.dispatch()

    async def work(self, name: str | None = None) -> None:
        for channel in self.desk.channels.values():
            if name in {None, channel.receiver.name}:
                await channel.work()

    async def round(self) -> None:
        """A look, and all that follows from it."""
        self.look()
        await self.dispatch()
        await self.work()
        await self.desk.ledger.flush()
