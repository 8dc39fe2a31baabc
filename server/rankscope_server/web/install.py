"""
Puts the web half onto an application.
"""

from pathlib import Path

from fastapi import FastAPI

from rankscope_server.domain.ports import Rankscope
from rankscope_server.web.api import create_api_router
from rankscope_server.web.api_alerts import create_alert_router
from rankscope_server.web.api_incidents import create_incident_router
from rankscope_server.web.assets import Assets, VersionedStaticFiles
from rankscope_server.web.counts import LiveCounts
from rankscope_server.web.errors import install_error_handlers
from rankscope_server.web.live import LiveFragments
from rankscope_server.web.live_alerts import LiveAlerts
from rankscope_server.web.live_incidents import LiveIncidents
from rankscope_server.web.pages import create_page_router
from rankscope_server.web.report_pages import create_report_router
from rankscope_server.web.streams import create_stream_router
from rankscope_server.web.templating import Templates


def install(app: FastAPI, rankscope: Rankscope, *, templates_dir: Path, static_dir: Path) -> None:
    """
    Add pages, `/api/v1/...`, `/static/...` and the handlers that render errors to `app`.
    """
    templates = Templates(templates_dir, Assets(static_dir))
    app.mount("/static", VersionedStaticFiles(directory=static_dir), name="static")
    for create in (create_api_router, create_incident_router, create_alert_router):
        app.include_router(create(rankscope))
    counts = LiveCounts(rankscope, templates)
    live = LiveFragments(rankscope, templates)
    incidents, alerts = LiveIncidents(rankscope, templates), LiveAlerts(rankscope, templates)
    app.include_router(create_stream_router(rankscope, live, incidents, alerts, counts))
    app.include_router(create_page_router(rankscope, templates, live, counts, app))
    app.include_router(create_report_router(rankscope, templates, incidents, counts))
    install_error_handlers(app, templates, counts)
