"""
The JSON API of incidents, and the files that are kept of them.
"""

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, status
from pydantic import BaseModel
from starlette.responses import Response

from rankscope_server.domain.incident import IncidentCard, IncidentView
from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.api import Problem
from rankscope_server.web.wire import to_wire, wire_model

MAX_INCIDENTS = 1000

NO_INCIDENT = "No incident of this id is known. `GET /api/v1/incidents` lists those that are."
NO_CAPTURE = (
    "No flight records of this number are kept. `captures` of the incident lists those that are, the first being 0; "
    "those of incidents that are long closed are deleted."
)

NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "No such incident"}}
ZIP_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/zip": {}}, "description": "A zip file"},
    404: {"model": Problem, "description": "No such incident, or nothing is kept of it"},
}


def create_incident_router(rankscope: Rankscope) -> APIRouter:
    """
    The routes under `/api/v1/incidents`.
    """
    router = APIRouter(prefix="/api/v1/incidents", tags=["api"])

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

    return router


def attachment(content: bytes, media_type: str, name: str) -> Response:
    """
    A file to be kept under `name`, which has to be plain ASCII without quotes.
    """
    return Response(content, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{name}"'})
