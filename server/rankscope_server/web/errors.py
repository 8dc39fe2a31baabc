"""
Errors as pages that name a remedy, and as JSON for the API.
"""

from http import HTTPStatus
from typing import cast

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rankscope_server.web.counts import UNKNOWN_COUNTS, Counts, LiveCounts
from rankscope_server.web.templating import Templates

REMEDIES = {
    404: "Check the address, or start from the fleet page. An engine leaves its address when vLLM is restarted: it comes back under a new one. Incidents are listed on their own page.",
    405: "This address does not take this method; the API page lists what each one takes.",
    409: "The reason above says what to do instead.",
    422: "Check the fields named above and send the request again.",
    500: "Reload the page. If it comes again, the server's log has the trace under the time of this page: please report it with that.",
    503: "Try again in a few seconds.",
}

log = structlog.get_logger(__name__)


def install_error_handlers(app: FastAPI, templates: Templates, live_counts: LiveCounts) -> None:
    """
    Answer every error of `app` in the form that the asker reads.
    """

    def answer(
        request: Request, code: int, detail: str, headers: dict[str, str] | None = None, counts: Counts = UNKNOWN_COUNTS
    ) -> Response:
        if wants_json(request):
            return JSONResponse({"detail": detail}, code, headers)
        context = {
            "code": code,
            "title": HTTPStatus(code).phrase,
            "detail": detail,
            "remedy": REMEDIES.get(code, ""),
            "page": "",
            "counts": counts,
        }
        if "HX-Request" in request.headers:
            return HTMLResponse(templates.block("error.html", "problem", **context), code, headers)
        return HTMLResponse(templates.page("error.html", **context), code, headers)

    async def on_http_error(request: Request, error: Exception) -> Response:
        known = cast("HTTPException", error)
        detail = known.detail
        if detail == HTTPStatus(known.status_code).phrase:
            detail = f"There is nothing at {request.url.path}." if known.status_code == 404 else f"{detail}."
        return answer(request, known.status_code, detail, dict(known.headers or {}), await live_counts.now())

    async def on_invalid(request: Request, error: Exception) -> Response:
        detail = describe_invalid(cast("RequestValidationError", error))
        return answer(request, 422, detail, counts=await live_counts.now())

    def on_crash(request: Request, error: Exception) -> Response:
        # The error goes on to the HTTP server, which logs the trace.
        log.error("web.request_failed", path=request.url.path, error=repr(error))
        return answer(request, 500, "Something went wrong in the server.")

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_crash)


def wants_json(request: Request) -> bool:
    """
    Whether the asker reads JSON: everything under `/api/` that is not the API's own page.
    """
    return request.url.path.startswith("/api/")


def describe_invalid(error: RequestValidationError) -> str:
    """
    Which fields are wrong and how, in one line.
    """
    said = [
        f"{'.'.join(str(part) for part in item['loc'][1:]) or item['loc'][0]}: {item['msg']}" for item in error.errors()
    ]
    return "; ".join(said)
