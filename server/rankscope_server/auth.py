"""
Who may do what: passwords, and the checks that keep foreign web pages out. All of it is ASGI middleware, so that it
holds for every route there is and will be.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from pwdlib import PasswordHash
from pwdlib.exceptions import PwdlibError
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope_server.settings import ConfigError, is_loopback, read_private_text

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL_ACTOR = "local"

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    ]
)

SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class SecurityHeaders:
    """
    Puts the security headers on every response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Answer, with the headers.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
            await send(message)

        await self.app(scope, receive, send_with_headers)


class HostCheck:
    """
    Refuses requests that name a host which is not ours: a page elsewhere whose name was pointed at this machine.
    """

    def __init__(self, app: ASGIApp, *, names: frozenset[str]) -> None:
        self.app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Answer if the host is ours.
        """
        if scope["type"] in {"http", "websocket"}:
            host = Headers(scope=scope).get("host", "")
            if host_name(host) not in self._names:
                text = f"This server does not answer to the name {host!r}. Use its own address, or name it with --allowed-host.\n"
                await PlainTextResponse(text, 421)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class OriginCheck:
    """
    Refuses unsafe methods that a page of another origin sends. Clients that are no browsers send neither header and pass.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Answer if the request is safe, or of our own pages.
        """
        if scope["type"] == "websocket" or (
            scope["type"] == "http" and scope["method"] not in SAFE_METHODS and not same_origin(Headers(scope=scope))
        ):
            text = "A page of another origin may not do this. Open the dashboard itself and do it there.\n"
            await PlainTextResponse(text, 403)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def same_origin(headers: Mapping[str, str]) -> bool:
    """
    Whether a request comes from a page of ours, or from no page at all.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in {"same-origin", "none"}
    origin = headers.get("origin")
    return origin is None or (origin != "null" and urlsplit(origin).netloc.lower() == headers.get("host", "").lower())


def host_name(host: str) -> str:
    """
    The name in a `Host` header, without the port, in lower case; empty if it is none.
    """
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def own_names(host: str, allowed: Sequence[str]) -> frozenset[str]:
    """
    The names under which a server on address `host` answers.
    """
    names = {"localhost", "127.0.0.1", "::1", *(name.lower().strip("[]") for name in allowed)}
    if host not in {"0.0.0.0", "::", ""}:  # noqa: S104  compared, not listened on
        names.add(host.lower().strip("[]"))
    return frozenset(names)


class Passwords:
    """
    Users and the hashes of their passwords. A password that was right once is remembered by a keyed digest, since the
    hash is slow on purpose and browsers send the password with each request.
    """

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = dict(hashes)
        self._hasher = PasswordHash.recommended()
        self._key = secrets.token_bytes(32)
        self._right: dict[str, bytes] = {}
        self._nobody = self._hasher.hash(secrets.token_hex(16))
        self._limiter: anyio.CapacityLimiter | None = None

    async def check(self, user: str, password: str) -> bool:
        """
        Whether the password is that of the user.
        """
        digest = hmac.digest(self._key, password.encode(), hashlib.sha256)
        if user in self._right and hmac.compare_digest(self._right[user], digest):
            return True
        # An unknown user costs the same time as a known one; two at a time, so that guessing cannot take the machine.
        self._limiter = self._limiter or anyio.CapacityLimiter(2)
        stored = self._hashes.get(user, self._nobody)
        right = (
            await anyio.to_thread.run_sync(self._verify, password, stored, limiter=self._limiter)
            and user in self._hashes
        )
        if right:
            self._right[user] = digest
        return right

    def _verify(self, password: str, stored: str) -> bool:
        try:
            return self._hasher.verify(password, stored)
        except PwdlibError:
            return False


class BasicAuth:
    """
    Asks for a password on everything, and notes who it was; without passwords everybody is `local`.
    """

    def __init__(self, app: ASGIApp, *, passwords: Passwords | None) -> None:
        self.app = app
        self._passwords = passwords

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Answer those who may be here.
        """
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        actor: str | None = LOCAL_ACTOR
        if self._passwords is not None:
            user, password = read_basic(Headers(scope=scope).get("authorization", ""))
            actor = user if user and await self._passwords.check(user, password) else None
        if actor is None:
            headers = {"www-authenticate": 'Basic realm="Rankscope", charset="UTF-8"'}
            await PlainTextResponse("Sign in with a user of the password file.\n", 401, headers)(scope, receive, send)
            return
        state: MutableMapping[str, object] = scope.setdefault("state", {})
        state["actor"] = actor
        await self.app(scope, receive, send)


def read_basic(header: str) -> tuple[str, str]:
    """
    User and password in an `Authorization` header; both empty if it holds none.
    """
    scheme, _, text = header.partition(" ")
    if scheme.lower() != "basic":
        return "", ""
    try:
        user, colon, password = base64.b64decode(text.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return "", ""
    return (user, password) if colon else ("", "")


def read_passwords(path: Path) -> Passwords:
    """
    The users in a password file: lines of `user:hash`; empty lines and those that begin with # count for nothing.

    Raises:
        ConfigError: it cannot be read, holds no user, or a line is not understood.

    """
    hashes: dict[str, str] = {}
    for number, line in enumerate(read_private_text(path, "password file").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, colon, stored = line.strip().partition(":")
        if not colon or not user or not stored.startswith("$argon2"):
            msg = (
                f"password file {path}, line {number}: not `user:hash`; make such a line with `rankscope password NAME`"
            )
            raise ConfigError(msg)
        if user in hashes:
            msg = f"password file {path}, line {number}: {user} is there twice; keep one of the lines"
            raise ConfigError(msg)
        hashes[user] = stored
    if not hashes:
        msg = f"password file {path} holds no user: add a line with `rankscope password NAME >> {path}`"
        raise ConfigError(msg)
    return Passwords(hashes)


def password_line(user: str, password: str) -> str:
    """
    A line for the password file.

    Raises:
        ConfigError: the name or the password cannot be used.

    """
    if not user or ":" in user or any(char.isspace() for char in user) or user.startswith("#"):
        msg = f"{user!r} cannot be a user name: no colon, no space, no # in front"
        raise ConfigError(msg)
    if len(password) < 8:
        msg = "the password is too short: 8 characters at least"
        raise ConfigError(msg)
    return f"{user}:{PasswordHash.recommended().hash(password)}"


def guard(app: ASGIApp, *, names: frozenset[str] | None, passwords: Passwords | None) -> ASGIApp:
    """
    `app` behind all checks, outermost first: headers, host, password, origin. `names` None: any host may be named.
    """
    guarded: ASGIApp = OriginCheck(app)
    guarded = BasicAuth(guarded, passwords=passwords)
    if names is not None:
        guarded = HostCheck(guarded, names=names)
    return SecurityHeaders(guarded)


def checked_names(host: str, allowed: Sequence[str], passwords: Passwords | None) -> frozenset[str] | None:
    """
    The names to check for; None where a password guards everything and no name was set.

    A page that has pointed its own name here holds no password for that name, so nothing is lost; and the server cannot
    know by which of its names other machines call it.
    """
    if passwords is not None and not allowed and not is_loopback(host):
        return None
    return own_names(host, allowed)
