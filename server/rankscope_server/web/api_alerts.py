"""
The JSON API of alerts.
"""

from fastapi import APIRouter
from pydantic import BaseModel

from rankscope_server.domain.alert import AlertsView
from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.wire import to_wire, wire_model


def create_alert_router(rankscope: Rankscope) -> APIRouter:
    """
    The routes under `/api/v1/alerts`.
    """
    router = APIRouter(prefix="/api/v1", tags=["api"])

    @router.get("/alerts", response_model=wire_model(AlertsView), summary="The alerts page")
    async def alerts() -> BaseModel:
        """
        Alerts that fire or are pending, those that were resolved, and how each receiver takes what is sent to it.
        """
        return to_wire(await rankscope.alerts())

    return router
