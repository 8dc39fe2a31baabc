"""
Answering those who bring the right token, and nobody who tries one after the other.
"""

import logging
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rankscope_exporter.contract import HEALTH_PATH
from rankscope_exporter.serve.limits import client_of, too_many
from rankscope_exporter.serve.private import Renewed
from rankscope_exporter.serve.rates import Rates
from rankscope_exporter.serve.tokens import Caller, Tokens, assess_access, assess_caller, may_read, needs_token

logger = logging.getLogger("rankscope.exporter")

MAY_READ = "rankscope.may_read"
"""
Where the scope of a request says whether its caller may know of ranks.
"""


class AccessCheck:
    """
    Refuses requests without the token that they need, and clients that try one wrong token after the other.
    """

    def __init__(self, app: ASGIApp, tokens: Renewed[Tokens], failures: Rates, seconds: Callable[[], float]) -> None:
        self._app = app
        self._tokens = tokens
        self._failures = failures
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Answer or pass on one request.
        """
        refused = self._refusal(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        tokens, method, path = self._tokens.value, scope["method"], scope["path"]
        authorization = Headers(scope=scope).get("authorization", "")
        caller = Caller.ANONYMOUS
        if authorization and needs_token(method, path, tokens):
            client, now = client_of(scope), self._seconds()
            # The token is not even looked at then, or guessing could go on at full speed.
            if seconds := self._failures.wait(client, now):
                if path != HEALTH_PATH:
                    return too_many("too many wrong tokens from this address", seconds)
            else:
                caller = assess_caller(authorization, tokens)
                if caller is Caller.UNKNOWN:
                    self._failures.take(client, now)
                    logger.warning("wrong token from %s", client)
        scope[MAY_READ] = may_read(caller, tokens)
        refusal = assess_access(method, path, caller, tokens)
        if refusal is None:
            return None
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        return PlainTextResponse(f"{refusal.detail}\n", refusal.status, headers)
