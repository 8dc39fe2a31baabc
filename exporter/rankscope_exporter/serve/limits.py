"""
What is refused before anything is read: requests when there are too many, and heads that are too long.
"""

import math
from collections.abc import Callable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rankscope_exporter.contract import HEALTH_PATH
from rankscope_exporter.serve.connections import Connections
from rankscope_exporter.serve.rates import Rates, client_key

MAX_HEAD_BYTES = 65536
"""
Path, query and headers of a request. The cursor of `/v1/steps` takes 22 bytes for each rank of the node.
"""


def client_of(scope: Scope) -> str:
    """
    The client that sent a request, as rates count clients.
    """
    client = scope.get("client")
    return client_key(client[0]) if client else ""


def head_bytes(scope: Scope) -> int:
    """
    The size of a request's head, as far as a client can make it long.
    """
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len((scope.get("raw_path") or b"").partition(b"?")[0]) + len(scope.get("query_string") or b"")


class Limits:
    """
    Refuses requests of clients that send too many with 429, all but health with 503 while there are too many
    connections, and heads that are too long with 431.
    """

    def __init__(self, app: ASGIApp, rates: Rates, connections: Connections, seconds: Callable[[], float]) -> None:
        self._app = app
        self._rates = rates
        self._connections = connections
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Answer or pass on one request.
        """
        refused = self._refusal(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        is_health = scope["path"] == HEALTH_PATH
        if self._connections.crowded and not is_health:
            text = f"more than {self._connections.limit} connections are busy: try again, or raise RANKSCOPE_MAX_CONNECTIONS\n"
            return PlainTextResponse(text, 503, {"Retry-After": "1", "Connection": "close"})
        if head_bytes(scope) > MAX_HEAD_BYTES:
            text = f"path, query and headers have more than {MAX_HEAD_BYTES} bytes together\n"
            return PlainTextResponse(text, 431, {"Connection": "close"})
        # A probe has a bucket of its own: a busy client at its address must not make this process look ill.
        key = f"{client_of(scope)} {HEALTH_PATH}" if is_health else client_of(scope)
        if seconds := self._rates.take(key, self._seconds()):
            return too_many("too many requests from this address: see RANKSCOPE_REQUEST_RATE", seconds)
        return None


def too_many(detail: str, seconds: float) -> PlainTextResponse:
    """
    The answer to one request too many, with the time after which the next may come.
    """
    wait = math.ceil(seconds)
    return PlainTextResponse(f"{detail}; try again in {wait} s\n", 429, {"Retry-After": str(wait)})
