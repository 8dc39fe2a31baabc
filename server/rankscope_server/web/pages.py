"""
The pages. What they show is a view of the read model; what they say about it is in the templates.
"""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Form, HTTPException, Request, status
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from rankscope_server.domain.ports import Rankscope, ToggleOutcome, TogglePlan
from rankscope_server.web.actor import actor_of
from rankscope_server.web.counts import LiveCounts
from rankscope_server.web.drift_table import tabulate_drift
from rankscope_server.web.guidance import order_by_need, summarise
from rankscope_server.web.links import engine_path, fix_path, fleet_path
from rankscope_server.web.live import LiveFragments
from rankscope_server.web.openapi_page import list_operations
from rankscope_server.web.recent import recent_series
from rankscope_server.web.templating import Templates
from rankscope_server.web.words import sentence

AUDIT_ROWS = 200

Switch = Literal["on", "off"]


def create_page_router(
    rankscope: Rankscope, templates: Templates, live: LiveFragments, counts: LiveCounts, app: FastAPI
) -> APIRouter:
    """
    The routes of the pages. `app` is asked for its OpenAPI description when the API page is read.
    """
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    async def render(name: str, **context: object) -> str:
        return templates.page(name, counts=await counts.now(), **context)

    @router.get("/")
    async def fleet() -> str:
        view, _ = live.fleet()
        return await render(
            "fleet.html",
            page=fleet_path(),
            deployments=order_by_need(view.deployments),
            rendered=live.fleet_cards(),
            summary=summarise(view),
            problems=view.problems,
        )

    @router.get("/deployments/{deployment}/engines/{engine}")
    async def engine(deployment: str, engine: str) -> str:
        view = rankscope.engine(deployment, engine)
        if view is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, f"No engine {engine} of a deployment {deployment} is known.")
        series = await recent_series(rankscope, deployment, engine)
        return await render(
            "engine.html", page=engine_path(deployment, engine), view=view, table=tabulate_drift(series)
        )

    @router.get("/audit")
    async def audit() -> str:
        return await render("audit.html", page="/audit", rows=await rankscope.audit(AUDIT_ROWS), limit=AUDIT_ROWS)

    @router.get("/api")
    async def api() -> str:
        description = await run_in_threadpool(app.openapi)
        return await render("api.html", page="/api", operations=list_operations(description))

    def find_plan(deployment: str, engine: str | None, desired: Switch) -> TogglePlan:
        plan = rankscope.plan_toggle(deployment, engine, desired=desired == "on")
        if plan is None:
            what = (
                f"No deployment {deployment}" if engine is None else f"No engine {engine} of a deployment {deployment}"
            )
            raise HTTPException(status.HTTP_404_NOT_FOUND, f"{what} is known.")
        return plan

    async def confirmation(
        request: Request, plan: TogglePlan, engine: str | None, outcome: ToggleOutcome | None = None
    ) -> Response:
        code = status.HTTP_200_OK if outcome is None or outcome.accepted else status.HTTP_409_CONFLICT
        context: dict[str, Any] = {
            "plan": plan,
            "outcome": outcome,
            "action": fix_path(plan.deployment, engine),
            "back": _after(plan, engine),
        }
        if _by_htmx(request):
            return HTMLResponse(templates.block("confirm.html", "confirmation", in_dialog=True, **context), code)
        return HTMLResponse(await render("confirm.html", page=context["back"], in_dialog=False, **context), code)

    async def carry_out(request: Request, deployment: str, engine: str | None, desired: Switch) -> Response:
        plan = find_plan(deployment, engine, desired)
        outcome = await rankscope.toggle(deployment, engine, desired=plan.desired, actor=actor_of(request))
        if not outcome.accepted or outcome.unsent:
            return await confirmation(request, plan, engine, outcome)
        after = _after(plan, engine)
        if not _by_htmx(request):
            return RedirectResponse(f"{after}#fix", status.HTTP_303_SEE_OTHER)
        # The page's script closes the dialog, says the reason aloud and goes to where progress is shown.
        event = {"rankscope:toggled": {"sentence": sentence(outcome.reason), "page": after}}
        return Response(status_code=status.HTTP_204_NO_CONTENT, headers={"HX-Trigger": json.dumps(event)})

    @router.get("/deployments/{deployment}/engines/{engine}/fix")
    async def ask_engine(request: Request, deployment: str, engine: str, desired: Switch) -> Response:
        return await confirmation(request, find_plan(deployment, engine, desired), engine)

    @router.get("/deployments/{deployment}/fix")
    async def ask_deployment(request: Request, deployment: str, desired: Switch) -> Response:
        return await confirmation(request, find_plan(deployment, None, desired), None)

    @router.post("/deployments/{deployment}/engines/{engine}/fix")
    async def toggle_engine(
        request: Request, deployment: str, engine: str, desired: Annotated[Switch, Form()]
    ) -> Response:
        return await carry_out(request, deployment, engine, desired)

    @router.post("/deployments/{deployment}/fix")
    async def toggle_deployment(request: Request, deployment: str, desired: Annotated[Switch, Form()]) -> Response:
        return await carry_out(request, deployment, None, desired)

    return router


def _by_htmx(request: Request) -> bool:
    return "HX-Request" in request.headers


def _after(plan: TogglePlan, engine: str | None) -> str:
    """
    Where progress of a toggle is shown.
    """
    if engine is not None:
        return engine_path(plan.deployment, engine)
    return engine_path(plan.deployment, plan.engines[0]) if len(plan.engines) == 1 else fleet_path()
