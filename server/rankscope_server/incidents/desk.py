"""
The incidents of all engines: opened, followed, kept, and answered for.

`observe` is called at each look at an engine and does no more than follow its incident. All that takes time is done by
`keep`, which the caller calls again and again: it copies flight records, and puts into the store what has changed.
"""

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import anyio
import structlog

from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts
from rankscope_server.domain.findings import EngineMemory
from rankscope_server.domain.incident import IncidentCard, IncidentEvent, IncidentLife, IncidentView
from rankscope_server.domain.incident_captures import KeptCapture, plan_captures, plan_removals
from rankscope_server.domain.incident_life import Incident, close, follow, note, resume
from rankscope_server.domain.incident_story import build_card, build_incident, tell
from rankscope_server.domain.state import current_findings
from rankscope_server.incidents.capture import Capture, CaptureSubject, make_capture
from rankscope_server.ingest.clock import Clock
from rankscope_server.store import Store, StoreError
from rankscope_server.store.incidents import IncidentStore

logger = structlog.get_logger("rankscope.incidents")

MAX_CAPTURE_BYTES = 200_000_000
"""
All captures together.
"""

MAX_UNSAVED_BYTES = 64_000_000
"""
Captures that wait for a store that is away; the oldest ones go first.
"""

CAPTURE_SECONDS = 5.0
"""
How long `keep` goes on to make captures; those that are left are made next time.
"""

CLOSED_HELD = 200
"""
Closed incidents that are held in memory; older ones are in the store.
"""

REFRESH_SECONDS = 30.0
"""
How often an incident is put into the store though nothing but the words of its findings has changed.
"""

SWEEP_SECONDS = 300.0
FORGET_SECONDS = 365 * 86400.0
"""
Incidents that were closed longer ago than this are forgotten.
"""

_URGENCY = {IncidentLife.WEDGED: 0, IncidentLife.WORSENING: 1, IncidentLife.OPEN: 2}
"""
Which captures are made first when many are due.
"""

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Saved:
    incident: Incident
    at: float
    """Monotonic second."""


@dataclass(frozen=True, slots=True)
class _Due:
    """
    A capture that is to be made.
    """

    engine: EngineFacts
    life: IncidentLife
    reasons: tuple[str, ...]


class IncidentDesk:
    """
    Knows every incident that is not closed, and the last ones that were. One event loop owns it.
    """

    def __init__(self, clock: Clock, *, retention_seconds: float, most_capture_bytes: int = MAX_CAPTURE_BYTES) -> None:
        self._clock = clock
        self._retention_seconds = retention_seconds
        self._most_capture_bytes = most_capture_bytes
        self._store: IncidentStore | None = None
        self._open: dict[Key, Incident] = {}
        self._closed: dict[str, Incident] = {}
        """By id, oldest first."""
        self._facts: dict[Key, EngineFacts] = {}
        """What was seen last of engines with an open incident."""
        self._due: dict[str, _Due] = {}
        self._unsaved: dict[tuple[str, int], bytes] = {}
        """Captures that the store does not have yet, oldest first."""
        self._saved: dict[str, _Saved] = {}
        self._renamed: dict[str, str] = {}
        self._keeping = anyio.Lock()
        self._swept = float("-inf")
        self.problem = ""
        """Why something cannot be read from the store, with the remedy; empty while all goes well."""

    # -- looks

    def observe(self, engine: EngineFacts, memory: EngineMemory, now: Moment) -> None:
        """
        Follow the incident of an engine, after a look at it.
        """
        key = (engine.deployment, engine.engine)
        known = self._open.get(key)
        if known is None and not memory.findings:
            return
        taken = self._ids() if known is None else ()
        incident, events = follow(known, engine, memory, current_findings(engine, memory), now, taken)
        if incident is None:
            return
        _log(incident, events)
        self._facts[key] = engine
        stood = known if known is not None and incident.life is IncidentLife.CLOSED else incident
        self._want_capture(stood, engine, ended=engine.ended)
        self._put(incident)

    def forget(self, deployment: str, engine: str, now: Moment) -> None:
        """
        An engine is not known any more: its processes are gone, and so are their flight files.
        """
        known = self._open.get((deployment, engine))
        if known is None:
            return
        facts = self._facts.get((deployment, engine))
        if facts is not None:
            self._want_capture(known, facts, ended=True)
        incident, events = close(known, "The engine is gone, and its flight files with it.", now)
        _log(incident, events)
        self._put(incident)

    def absent(self, deployment: str, known: Collection[str], now: Moment) -> None:
        """
        Every exporter of a deployment has answered, and these are all engines that they know of: the others are gone.
        """
        for of, engine in [key for key in self._open if key[0] == deployment and key[1] not in known]:
            self.forget(of, engine, now)

    def note(self, deployment: str, engine: str, what: str, sentence: str, at_unix: float) -> None:
        """
        Put something that was done into the timeline of the incident that is open on an engine, if one is. An empty
        `engine` means every engine of the deployment.
        """
        for key, incident in list(self._open.items()):
            if key[0] == deployment and engine in {"", key[1]}:
                self._put(note(incident, IncidentEvent(at_unix, what, sentence)))

    def _want_capture(self, incident: Incident, engine: EngineFacts, *, ended: bool) -> None:
        reasons = plan_captures(incident, engine.newest_step if ended else 0, ended=ended)
        if reasons:
            before = self._due.get(incident.id)
            known = () if before is None else before.reasons
            self._due[incident.id] = _Due(engine, incident.life, tuple(dict.fromkeys((*known, *reasons))))

    def _put(self, incident: Incident) -> None:
        key = (incident.deployment, incident.engine)
        if incident.life is not IncidentLife.CLOSED:
            self._open[key] = incident
            return
        self._closed[incident.id] = incident
        if key in self._open and self._open[key].id == incident.id:
            del self._open[key]
            self._facts.pop(key, None)

    def _ids(self) -> set[str]:
        return {*self._closed, *(incident.id for incident in self._open.values())}

    def _held(self, incident: str) -> Incident | None:
        name = self._renamed.get(incident, incident)
        return self._closed.get(name) or next((one for one in self._open.values() if one.id == name), None)

    # -- reads

    def open_on(self, deployment: str, engine: str) -> str:
        """
        Id of the incident that is open on an engine; empty if none is.
        """
        incident = self._open.get((deployment, engine))
        return "" if incident is None else incident.id

    @property
    def open_count(self) -> int:
        """How many incidents are not closed."""
        return len(self._open)

    async def cards(self, limit: int, deployment: str | None = None) -> tuple[IncidentCard, ...]:
        """
        Incidents, those that are not closed first, then newest first. Without a store, as many as memory holds.
        """
        closed = {one.id: one for one in self._closed.values() if deployment in {None, one.deployment}}
        if self._store is not None:
            try:
                closed = {one.id: one for one in await self._store.closed(limit, deployment)} | closed
                self.problem = ""
            except StoreError as error:
                self.problem = str(error)
        live = [one for one in self._open.values() if deployment in {None, one.deployment}]
        ordered = [*_newest_first(live), *_newest_first(closed.values())]
        return tuple(build_card(incident) for incident in ordered[: max(0, limit)])

    async def view(self, incident: str) -> IncidentView | None:
        """
        The page of an incident; None where no such one is known.
        """
        found = self._held(incident)
        if found is None and self._store is not None:
            try:
                found = await self._store.find(incident)
                self.problem = ""
            except StoreError as error:
                self.problem = str(error)
        return None if found is None else build_incident(found)

    async def capture(self, incident: str, number: int) -> bytes | None:
        """
        A capture as a zip file; None where there is none, or where it was removed.
        """
        name = self._renamed.get(incident, incident)
        data = self._unsaved.get((name, number))
        if data is None and self._store is not None:
            try:
                data = await self._store.capture(name, number)
                self.problem = ""
            except StoreError as error:
                self.problem = str(error)
        return data

    # -- what takes time

    async def restore(self, store: Store, deployments: Collection[str]) -> None:
        """
        Take back the incidents that an earlier run of the server left open. Those of deployments that are not watched any
        more are closed. To be called once, before `keep` is given the store.

        Raises:
            StoreError: they cannot be read; nothing was taken back.

        """
        opened = IncidentStore(store)
        kept, closed = await opened.open(), await opened.closed(CLOSED_HELD)
        now = self._clock.now()
        for incident in reversed(closed):
            self._closed.setdefault(incident.id, incident)
            self._saved[incident.id] = _Saved(incident, now.monotonic)
        for incident in kept:
            self._saved[incident.id] = _Saved(incident, now.monotonic)
            self._take_back(dataclasses.replace(incident, quiet_since=None), deployments, now)
        self._store = opened

    def _take_back(self, incident: Incident, deployments: Collection[str], now: Moment) -> None:
        if incident.deployment not in deployments:
            self._put(close(incident, "The deployment is not watched any more.", now)[0])
            return
        newer = self._open.get((incident.deployment, incident.engine))
        if newer is None:
            self._put(incident)
            return
        for number in range(len(newer.captures)):
            data = self._unsaved.pop((newer.id, number), None)
            if data is not None:
                self._unsaved[incident.id, len(incident.captures) + number] = data
        due = self._due.pop(newer.id, None)
        if due is not None:
            self._due[incident.id] = due
        self._renamed[newer.id] = incident.id
        self._put(resume(incident, newer))

    async def keep(self, store: Store | None) -> None:
        """
        Make the captures that are due, and put into the store what has changed. Without a store, all of it waits.

        Raises:
            StoreError: something could not be put there; it is tried again next time.

        """
        async with self._keeping:
            failed = await self._try_save(store)
            until = self._clock.now().monotonic + CAPTURE_SECONDS
            for incident in sorted(self._due, key=lambda name: _URGENCY.get(self._due[name].life, len(_URGENCY))):
                await self._make_capture(incident)
                failed = await self._try_save(store)  # one after the other: they are large
                if self._clock.now().monotonic >= until:
                    break
            self._bound_unsaved()
            if failed is not None:
                raise failed
            now = self._clock.now()
            if self._store is not None and store is not None and now.monotonic - self._swept >= SWEEP_SECONDS:
                await self._sweep(self._store, now)
                self._swept = now.monotonic
            self._let_go()

    async def _try_save(self, store: Store | None) -> StoreError | None:
        if store is None or self._store is None:
            return None
        try:
            await self._save(self._store)
        except StoreError as error:  # told by the caller, once the evidence is safe in memory
            return error
        return None

    async def _make_capture(self, name: str) -> None:
        due, incident = self._due[name], self._held(name)
        if incident is None:
            del self._due[name]
            return
        key = (incident.deployment, incident.engine)
        engine = self._facts.get(key, due.engine)
        subject = CaptureSubject(engine, name, due.life, tell(incident), incident.findings)
        made: Capture | None = None
        try:
            made = await make_capture(subject, self._clock.now())
        except Exception as error:  # evidence that cannot be copied must not keep the incident from being told
            logger.exception("incident.capture_crashed", incident=name)
            event = IncidentEvent(
                self._clock.now().unix,
                "capture failed",
                f"The flight records could not be copied ({type(error).__name__}): see the server's log, and report it.",
            )
        else:
            event = IncidentEvent(made.view.at_unix, "captured", _tell_capture(made))
        current = self._held(name) or incident  # it went on meanwhile
        if made is not None:
            self._unsaved[current.id, len(current.captures)] = made.data
            current = dataclasses.replace(current, captures=(*current.captures, made.view))
        current = dataclasses.replace(current, capture_reasons=(*current.capture_reasons, *due.reasons))
        self._put(note(current, event))
        left = self._due.pop(name, due)
        reasons = tuple(reason for reason in left.reasons if reason not in due.reasons)
        if reasons:
            self._due[current.id] = dataclasses.replace(left, reasons=reasons)

    def _bound_unsaved(self) -> None:
        spare = sum(len(data) for data in self._unsaved.values()) - MAX_UNSAVED_BYTES
        for name, number in list(self._unsaved):
            if spare <= 0:
                return
            spare -= len(self._unsaved.pop((name, number)))
            incident = self._held(name)
            if incident is not None:
                self._put(_without(incident, number, "the store has been away for too long", self._clock.now()))

    async def _save(self, store: IncidentStore) -> None:
        now = self._clock.now()
        changed = [one for one in (*self._closed.values(), *self._open.values()) if self._is_changed(one, now)]
        for incident in changed:
            captures = [
                (KeptCapture(name, number, view.at_unix, view.size_bytes, None), data)
                for (name, number), data in list(self._unsaved.items())
                if name == incident.id
                for view in incident.captures[number : number + 1]
            ]
            await store.save([incident], captures)
            self._saved[incident.id] = _Saved(incident, now.monotonic)
            for row, _ in captures:
                self._unsaved.pop((row.incident, row.number), None)
                self._swept = float("-inf")  # there may be too many of them now

    def _is_changed(self, incident: Incident, now: Moment) -> bool:
        saved = self._saved.get(incident.id)
        if saved is None or (
            saved.incident is not incident
            and (
                _what_matters(saved.incident) != _what_matters(incident) or now.monotonic - saved.at >= REFRESH_SECONDS
            )
        ):
            return True
        return any(name == incident.id for name, _ in self._unsaved)

    async def _sweep(self, store: IncidentStore, now: Moment) -> None:
        removals = plan_removals(
            await store.captures(),
            now_unix=now.unix,
            retention_seconds=self._retention_seconds,
            most_bytes=self._most_capture_bytes,
        )
        for capture, why in removals:
            held = self._held(capture.incident)
            incident = held or await store.find(capture.incident)
            if incident is not None:
                incident = _without(incident, capture.number, why, now)
            if held is not None and incident is not None:
                self._put(incident)
            await store.save([] if incident is None else [incident], removed=[(capture.incident, capture.number)])
        await store.forget(now.unix - FORGET_SECONDS)

    def _let_go(self) -> None:
        """
        Hold no more closed incidents than are worth it; those that are in the store.
        """
        for name in list(self._closed)[:-CLOSED_HELD]:
            if name not in self._due and name in self._saved and self._saved[name].incident is self._closed[name]:
                del self._closed[name], self._saved[name]


def _newest_first(incidents: Iterable[Incident]) -> list[Incident]:
    return sorted(incidents, key=lambda one: (one.opened_unix, one.id), reverse=True)


def _what_matters(incident: Incident) -> object:
    """
    What an incident that is kept must not be behind in; words that change at each look are not among it.
    """
    known = [(one.evidence.requests, one.evidence.began_with) for one in incident.findings]
    return incident.life, incident.timeline, incident.captures, known


def _log(incident: Incident, events: Iterable[IncidentEvent]) -> None:
    for event in events:
        logger.info("incident.event", incident=incident.id, what=event.what, sentence=event.sentence)


def _without(incident: Incident, number: int, why: str, now: Moment) -> Incident:
    """
    The incident without one of its captures; the same where that is gone already.
    """
    if not any(view.kept for view in incident.captures[number : number + 1]):
        return incident
    captures = tuple(
        dataclasses.replace(view, kept=False) if index == number else view
        for index, view in enumerate(incident.captures)
    )
    event = IncidentEvent(now.unix, "capture removed", f"Copy {number + 1} of the flight records was removed: {why}.")
    return note(dataclasses.replace(incident, captures=captures), event)


def _tell_capture(made: Capture) -> str:
    view = made.view
    ranks = "1 rank" if view.ranks == 1 else f"{view.ranks} ranks"
    steps = f", steps {view.first_step} to {view.last_step}" if view.last_step else ""
    return f"The flight records of {ranks} were copied{steps}."
