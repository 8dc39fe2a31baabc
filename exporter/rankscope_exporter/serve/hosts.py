"""
By which names this exporter lets itself be called.

A page in somebody's browser can have its own name resolve to 127.0.0.1 and then read answers as its own (DNS
rebinding). The name still stands in the Host header, so names that are not ours are refused. A plain IP address
cannot be rebound, and is how Prometheus usually calls.
"""

import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def host_name(header: str) -> str:
    """
    The name or address in a Host header, without port and brackets, in lower case.
    """
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def is_allowed(header: str, names: frozenset[str]) -> bool:
    """
    Whether a request with this Host header may be answered: `names`, and any plain IP address.
    """
    name = host_name(header)
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def own_names(extra: Iterable[str] = ()) -> frozenset[str]:
    """
    The names of this machine that need no look-up, and those that the operator allows.
    """
    name = socket.gethostname()
    return frozenset(n.lower() for n in ("localhost", name, name.partition(".")[0], *extra))


class HostCheck:
    """
    Refuses requests for names that are not ours, with 421.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Answer or pass on one request.
        """
        if scope["type"] != "http" or is_allowed(header := Headers(scope=scope).get("host", ""), self._names):
            await self._app(scope, receive, send)
            return
        text = f"this exporter is not known as {host_name(header)!r}: call it by IP address, or set RANKSCOPE_ALLOWED_HOSTS to that name\n"
        await PlainTextResponse(text, 421)(scope, receive, send)
