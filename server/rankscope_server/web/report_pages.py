"""
The pages about incidents and alerts.
"""

from fastapi import APIRouter, HTTPException, status
from fastapi.responses import HTMLResponse

from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.counts import LiveCounts
from rankscope_server.web.incident_page import read_incident
from rankscope_server.web.links import alerts_path, incident_path, incidents_path
from rankscope_server.web.live_incidents import LiveIncidents, list_context
from rankscope_server.web.templating import Templates


def create_report_router(
    rankscope: Rankscope, templates: Templates, live: LiveIncidents, counts: LiveCounts
) -> APIRouter:
    """
    The routes of these pages.
    """
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    @router.get("/incidents")
    async def incidents() -> str:
        cards, _ = await live.listing()
        return templates.page("incidents.html", page=incidents_path(), counts=await counts.now(), **list_context(cards))

    @router.get("/incidents/{incident}")
    async def incident(incident: str) -> str:
        shown = await read_incident(rankscope, incident)
        if shown is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, f"No incident {incident} is known.")
        return templates.page("incident.html", page=incident_path(incident), counts=await counts.now(), shown=shown)

    @router.get("/alerts")
    async def alerts() -> str:
        return templates.page(
            "alerts.html", page=alerts_path(), counts=await counts.now(), view=await rankscope.alerts()
        )

    return router
