"""
The JSON API: the views that the pages show, and the toggle.
"""

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response, status
from pydantic import BaseModel, ConfigDict

from rankscope_server.domain.model import AuditRow, EngineView, FleetView, Series
from rankscope_server.domain.ports import Rankscope, ToggleOutcome, TogglePlan
from rankscope_server.web.actor import actor_of
from rankscope_server.web.wire import to_wire, wire_model

SERIES_WINDOW_SECONDS = 900.0
MAX_POINTS = 5000
MAX_AUDIT_ROWS = 1000

NO_ENGINE = "No engine of this name is known. `GET /api/v1/fleet` lists those that are."
NO_DEPLOYMENT = "No deployment of this name is known. `GET /api/v1/fleet` lists those that are."


class FixRequest(BaseModel):
    """
    What the trim fix shall be.
    """

    model_config = ConfigDict(extra="forbid")

    desired: bool
    """True turns it on, false off."""


class Problem(BaseModel):
    """
    Why a request was not answered, and what to do.
    """

    detail: str


NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "No such deployment or engine"}}
REFUSED: dict[int | str, dict[str, Any]] = {
    409: {"model": wire_model(ToggleOutcome), "description": "Refused; `reason` says why and what to do instead"}
}


def create_api_router(rankscope: Rankscope) -> APIRouter:
    """
    The routes under `/api/v1`.
    """
    router = APIRouter(prefix="/api/v1", tags=["api"])
    engine_route = "/deployments/{deployment}/engines/{engine}"

    @router.get("/fleet", response_model=wire_model(FleetView), summary="The fleet page")
    def fleet() -> BaseModel:
        """
        Every deployment with its engines: state, drift per rank, fix.
        """
        return to_wire(rankscope.fleet())

    @router.get(engine_route, response_model=wire_model(EngineView), responses=NOT_FOUND, summary="The engine page")
    def engine(deployment: str, engine: str) -> BaseModel:
        """
        Everything that is known about an engine: findings, ranks, guard decisions, drifting requests, fix.
        """
        view = rankscope.engine(deployment, engine)
        if view is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, NO_ENGINE)
        return to_wire(view)

    @router.get(
        f"{engine_route}/series",
        response_model=wire_model(Series),
        responses=NOT_FOUND,
        summary="Drift per rank over time",
    )
    async def series(
        deployment: str,
        engine: str,
        since: Annotated[float | None, Query(description="Unix seconds; 15 minutes before `until` if left out")] = None,
        until: Annotated[float | None, Query(description="Unix seconds; now if left out")] = None,
        max_points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 900,
    ) -> BaseModel:
        """
        One list of times, one of values per rank. A point is the largest value of the stretch that it stands for.
        """
        if rankscope.engine(deployment, engine) is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, NO_ENGINE)
        end = rankscope.fleet().now_unix if until is None else until
        start = end - SERIES_WINDOW_SECONDS if since is None else since
        return to_wire(await rankscope.series(deployment, engine, start, end, max_points))

    @router.get("/audit", response_model=list[wire_model(AuditRow)], summary="What was done, newest first")  # type: ignore[misc]
    async def audit(
        limit: Annotated[int, Query(ge=1, le=MAX_AUDIT_ROWS)] = 100, deployment: str | None = None
    ) -> list[BaseModel]:
        """
        Toggles, refusals of toggles and what the server did by itself to reach the desired state.
        """
        return [to_wire(row) for row in await rankscope.audit(limit, deployment)]

    @router.get(
        f"{engine_route}/fix/plan",
        response_model=wire_model(TogglePlan),
        responses=NOT_FOUND,
        summary="What toggling the trim fix would do",
    )
    def plan(deployment: str, engine: str, desired: bool) -> BaseModel:  # a query parameter
        """
        The text of the confirmation; `refusal` is empty if it can be done. Does nothing.
        """
        found = rankscope.plan_toggle(deployment, engine, desired=desired)
        if found is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, NO_ENGINE)
        return to_wire(found)

    async def toggle(
        request: Request, response: Response, deployment: str, engine: str | None, body: FixRequest
    ) -> BaseModel:
        if rankscope.plan_toggle(deployment, engine, desired=body.desired) is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, NO_DEPLOYMENT if engine is None else NO_ENGINE)
        outcome = await rankscope.toggle(deployment, engine, desired=body.desired, actor=actor_of(request))
        response.status_code = status.HTTP_202_ACCEPTED if outcome.accepted else status.HTTP_409_CONFLICT
        return to_wire(outcome)

    options: dict[str, Any] = {
        "response_model": wire_model(ToggleOutcome),
        "status_code": status.HTTP_202_ACCEPTED,
        "responses": NOT_FOUND | REFUSED,
    }

    @router.post(f"{engine_route}/fix", summary="Turn the trim fix on or off, on one engine", **options)
    async def toggle_engine(
        request: Request, response: Response, deployment: str, engine: str, body: FixRequest
    ) -> BaseModel:
        """
        Accepted means on its way: every rank acts at the same step. The engine's `fix.progress` says how far they are.
        """
        return await toggle(request, response, deployment, engine, body)

    @router.post(
        "/deployments/{deployment}/fix", summary="Turn the trim fix on or off, on a whole deployment", **options
    )
    async def toggle_deployment(request: Request, response: Response, deployment: str, body: FixRequest) -> BaseModel:
        """
        The same for every engine of the deployment.
        """
        return await toggle(request, response, deployment, None, body)

    return router
