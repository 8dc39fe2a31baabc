"""
The one object that pages and API work against, and the values that it answers toggles with.

`create_app` makes the real one and hands it to `web.install(app, rankscope, templates_dir=..., static_dir=...)`. What
the application has in place by the time a request reaches `web`:

- `request.state.actor` says who asks: the name of the user who signed in, or `local` where no password file is set.
- Unsafe methods from another origin, foreign `Host` headers and missing passwords were answered already.
- Every response gets the security headers, a strict Content-Security-Policy among them; `web` sets none itself.
- `/healthz` and `/metrics` exist; FastAPI's own documentation pages are off, `/api/v1/openapi.json` is on.

`web.install` adds everything else: pages, `/api/v1/...`, `/static/...`, and the handlers that render errors.
"""

from dataclasses import dataclass
from typing import Protocol

from rankscope_server.domain.alert import AlertsView
from rankscope_server.domain.incident import IncidentCard, IncidentView
from rankscope_server.domain.model import AuditRow, EngineView, FleetView, Series


@dataclass(frozen=True, slots=True)
class TogglePlan:
    """
    What turning the trim fix on or off would do: the text of the confirmation.
    """

    deployment: str
    desired: bool
    engines: tuple[str, ...]
    """The engines that it concerns."""
    ranks: tuple[str, ...]
    """The ranks that will act, by label (with the engine before it where there are several)."""
    effective_step: int | None
    """About which step every rank acts; None where the engine is idle (`timing` says what then)."""
    timing: str
    """A sentence on when: `every rank acts at about step 412, within a second`."""
    changes: str
    """A sentence on what it changes."""
    limits: tuple[str, ...]
    """What it cannot do, a sentence each: it does not revive a wedged engine, ..."""
    refusal: str
    """Why it cannot be done now, and what to do instead; empty if it can."""


@dataclass(frozen=True, slots=True)
class ToggleOutcome:
    """
    What became of a toggle: refused, or accepted and on its way to the ranks.
    """

    accepted: bool
    reason: str
    """Why it was refused, or what was sent; one or two sentences, never empty."""
    generation: int | None
    """Generation of the command; None if it was refused."""
    effective_step: int | None
    """First step at which the ranks act, largest over the engines; 0 means at once, None if it was refused."""
    unsent: tuple[str, ...] = ()
    """Exporters that did not take the command, with the error of each; sending is tried again each second."""


class Rankscope(Protocol):
    """
    What the server knows and can do. Reads are quick and never wait: they answer from memory.

    Names of deployments and engines come from a URL: unknown ones are None, an empty tuple or a `refusal`, never an
    exception.
    """

    @property
    def version(self) -> int:
        """Goes up whenever something that a page shows may have changed; views of one version are the same object."""

    async def wait_newer(self, version: int, timeout_seconds: float) -> int:
        """
        Wait until `self.version` is above `version`, at most `timeout_seconds`; the version that holds then.

        Any number of streams may wait. Ends early, with the same version, when the server shuts down: see `closing`.
        """
        ...

    @property
    def closing(self) -> bool:
        """Whether the server is shutting down: streams end."""

    def fleet(self) -> FleetView:
        """
        The fleet page.
        """
        ...

    def engine(self, deployment: str, engine: str) -> EngineView | None:
        """
        The engine page; None where no such engine is known.
        """
        ...

    async def series(
        self, deployment: str, engine: str, since_unix: float, until_unix: float, max_points: int
    ) -> Series:
        """
        Largest drift per rank, at most `max_points` points; each point is the largest value of what it stands for.

        Empty where no such engine is known.
        """
        ...

    async def incidents(self, limit: int, deployment: str | None = None) -> tuple[IncidentCard, ...]:
        """
        Incidents, those that are not closed first, then newest first.
        """
        ...

    async def incident(self, incident: str) -> IncidentView | None:
        """
        The page of an incident; None where no such one is known.
        """
        ...

    async def capture(self, incident: str, number: int) -> bytes | None:
        """
        A frozen copy of flight records (the `number`th of the incident, from 0), as a zip file; None where there is none.
        """
        ...

    async def alerts(self) -> AlertsView:
        """
        The alerts page.
        """
        ...

    async def audit(self, limit: int, deployment: str | None = None) -> tuple[AuditRow, ...]:
        """
        What was done, newest first.
        """
        ...

    def plan_toggle(self, deployment: str, engine: str | None, *, desired: bool) -> TogglePlan | None:
        """
        What a toggle would do; `engine` None means every engine of the deployment. None where there is no such thing.
        """
        ...

    async def toggle(self, deployment: str, engine: str | None, *, desired: bool, actor: str) -> ToggleOutcome:
        """
        Turn the trim fix on or off. Leaves an audit row whatever becomes of it; raises nothing.
        """
        ...
