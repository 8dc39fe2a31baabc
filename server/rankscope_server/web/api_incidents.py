"""
The JSON API of incidents, and the files that are kept of them.
"""

from typing import Annotated, Any

import structlog
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, HTTPException, Query, status
from pydantic import BaseModel
from starlette.responses import Response

from rankscope_server.domain.incident import IncidentCard, IncidentView
from rankscope_server.domain.ports import Rankscope
from rankscope_server.incidents.export import SCHEMA_VERSION, export_json
from rankscope_server.incidents.manifest import CaptureError
from rankscope_server.incidents.perfetto import trace_json
from rankscope_server.web.api import Problem
from rankscope_server.web.wire import to_wire, wire_model

MAX_INCIDENTS = 1000
TRACES_AT_ONCE = 1
"""
Traces are made on demand, which takes a processor for a while: others wait.
"""

NO_INCIDENT = "No incident of this id is known. `GET /api/v1/incidents` lists those that are."
NO_CAPTURE = (
    "No flight records of this number are kept. `captures` of the incident lists those that are, the first being 0; "
    "those of incidents that are long closed are deleted."
)
NO_TRACE = "No flight records of this incident are kept, and a trace is made of them."

NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "No such incident"}}
JSON_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}}, "description": f"A file of schema version {SCHEMA_VERSION}"},
    **NOT_FOUND,
}
TRACE_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}}, "description": "A file in the trace format that Perfetto opens"},
    404: {"model": Problem, "description": "No such incident, or nothing is kept of it"},
    500: {"model": Problem, "description": "Its flight records are kept and cannot be read"},
}
ZIP_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/zip": {}}, "description": "A zip file"},
    404: {"model": Problem, "description": "No such incident, or nothing is kept of it"},
}

log = structlog.get_logger(__name__)


def create_incident_router(rankscope: Rankscope) -> APIRouter:
    """
    The routes under `/api/v1/incidents`.
    """
    router = APIRouter(prefix="/api/v1/incidents", tags=["api"])
    tracing = CapacityLimiter(TRACES_AT_ONCE)

    async def find(incident: str) -> IncidentView:
        view = await rankscope.incident(incident)
        if view is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, NO_INCIDENT)
        return view

    @router.get("", response_model=list[wire_model(IncidentCard)], summary="Incidents, those not closed first")  # type: ignore[misc]
    async def incidents(
        limit: Annotated[int, Query(ge=1, le=MAX_INCIDENTS)] = 100, deployment: str | None = None
    ) -> list[BaseModel]:
        """
        Findings of one cause, from the first to the last, as one incident each; newest first among equals.
        """
        return [to_wire(card) for card in await rankscope.incidents(limit, deployment)]

    @router.get(
        "/{incident}", response_model=wire_model(IncidentView), responses=NOT_FOUND, summary="The page of an incident"
    )
    async def one(incident: str) -> BaseModel:
        """
        Its findings with their evidence, its timeline, and the flight records that are kept of it.
        """
        return to_wire(await find(incident))

    @router.get(
        "/{incident}/captures/{number}.zip",
        response_class=Response,
        responses=ZIP_FILE,
        summary="Flight records around an incident",
    )
    async def capture(incident: str, number: int) -> Response:
        """
        A frozen copy of the flight files of every rank, with what is known of them in `capture.json`.
        """
        view = await find(incident)
        content = await rankscope.capture(incident, number)
        if content is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, NO_CAPTURE)
        return attachment(content, "application/zip", f"{view.card.id}-{number}.zip")

    @router.get(
        "/{incident}/trace.json", response_class=Response, responses=TRACE_FILE, summary="An incident as a trace"
    )
    async def trace(incident: str) -> Response:
        """
        The newest flight records with a track for each rank, for the Perfetto UI: steps, decisions, drift.
        """
        view = await find(incident)
        for number in reversed(range(len(view.captures))):
            content = await rankscope.capture(incident, number)
            if content is None:
                continue
            try:
                made = await to_thread.run_sync(trace_json, content, limiter=tracing)
            except CaptureError as error:
                log.warning("web.capture_unreadable", incident=view.card.id, number=number, error=str(error))
                raise HTTPException(
                    status.HTTP_500_INTERNAL_SERVER_ERROR,
                    f"Flight records {number} of this incident cannot be read: {error}. Keep the zip file, and report it.",
                ) from error
            return attachment(made, "application/json", f"{view.card.id}-trace.json")
        raise HTTPException(status.HTTP_404_NOT_FOUND, NO_TRACE)

    @router.get(
        "/{incident}/export.json", response_class=Response, responses=JSON_FILE, summary="An incident as a file"
    )
    async def export(incident: str) -> Response:
        """
        Everything that its page shows, in plain types, to be kept elsewhere.
        """
        view = await find(incident)
        return attachment(export_json(view), "application/json", f"{view.card.id}.json")

    return router


def attachment(content: bytes, media_type: str, name: str) -> Response:
    """
    A file to be kept under `name`, which has to be plain ASCII without quotes.
    """
    return Response(content, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{name}"'})
