"""
Sending over HTTP, with what a receiver asks for, and what its answers mean.
"""

import ssl
from collections.abc import Generator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx2

from rankscope_server.alert_settings import ReceiverSettings
from rankscope_server.notify.receiver import DeliveryError
from rankscope_server.settings import ConfigError, is_loopback, read_private_text

EXCERPT_BYTES = 2000
"""
How much of an answer is read, to say why it refuses.
"""

OF_THE_BODY = {400, 413, 422}
"""
Answers that are about what was sent: the receiver may take something else.
"""


class FileAuth(httpx2.Auth):
    """
    A user's password or a token, read from its file for each request, so that it can be replaced while the server runs.
    """

    def __init__(self, username: str | None, path: Path, where: str) -> None:
        self._username = username
        self._path = path
        self._where = where

    def read(self) -> str:
        """
        What is in the file.

        Raises:
            ConfigError: it cannot be used.

        """
        what = "bearer token file" if self._username is None else "password file"
        return read_private_text(self._path, f"{self._where}: {what}").splitlines()[0].strip()

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """
        The request, with the header.
        """
        if self._username is None:
            request.headers["Authorization"] = f"Bearer {self.read()}"
            yield request
        else:
            yield from httpx2.BasicAuth(self._username, self.read()).auth_flow(request)


def create_auth(settings: ReceiverSettings) -> FileAuth | None:
    """
    How requests to a receiver are authorized; None if they are not.

    Raises:
        ConfigError: a file cannot be used.

    """
    path = settings.password_file or settings.bearer_token_file
    if path is None:
        return None
    auth = FileAuth(settings.username, path, f"receiver {settings.name}")
    auth.read()
    return auth


def create_context(settings: ReceiverSettings) -> ssl.SSLContext:
    """
    Whom to trust at the other end.

    Raises:
        ConfigError: the file of the authority cannot be used.

    """
    if settings.ca_file is None:
        context = ssl.create_default_context()
    else:
        # A named authority stands instead of those of the system.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(settings.ca_file)
        except OSError as error:
            of_file = not isinstance(error, ssl.SSLError) and error.strerror
            reason = of_file or "no certificate in PEM form"
            msg = f"receiver {settings.name}: ca_file {settings.ca_file}: {reason}"
            raise ConfigError(msg) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class HttpSender:
    """
    Posts to one address. Redirects are not followed: what is sent is for this address only.

    `proxied`: by the proxy that the environment names, if it does; never to this machine itself.
    """

    def __init__(
        self, settings: ReceiverSettings, url: str, *, proxied: bool, transport: httpx2.AsyncBaseTransport | None
    ) -> None:
        self._url = url
        self._timeout = settings.timeout_seconds
        self._client = httpx2.AsyncClient(
            transport=transport,
            auth=create_auth(settings),
            verify=create_context(settings),
            timeout=settings.timeout_seconds,
            trust_env=proxied and not is_loopback(urlsplit(url).hostname or ""),
            follow_redirects=False,
        )

    async def close(self) -> None:
        """
        Let go of connections.
        """
        await self._client.aclose()

    async def post(self, body: bytes, headers: Mapping[str, str]) -> None:
        """
        Post JSON; any 2xx is success.

        Raises:
            DeliveryError: it was not taken.

        """
        try:
            with anyio.fail_after(self._timeout):
                status, text = await self._post(body, headers)
        except TimeoutError as error:
            msg = f"no answer within {self._timeout:g} s: it is overloaded, or a firewall drops the connection"
            raise DeliveryError(msg, reached=False) from error
        except httpx2.HTTPError as error:
            raise DeliveryError(explain(error), reached=False) from error
        except ConfigError as error:
            raise DeliveryError(str(error), reached=False) from error
        if not 200 <= status < 300:
            raise DeliveryError(explain_status(status, text), reached=status in OF_THE_BODY)

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        sent = {"Content-Type": "application/json", "User-Agent": "rankscope", **headers}
        async with self._client.stream("POST", self._url, content=body, headers=sent) as response:
            answer = bytearray()
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > EXCERPT_BYTES:
                    break
        return response.status_code, " ".join(bytes(answer).decode(errors="replace").split())[:200]


def shown_url(url: str, *, path: bool) -> str:
    """
    An address without secrets: without user and query, and without its path where that may hold one.
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    if path:
        return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
    return f"{parts.scheme}://{host}{'/...' if parts.path.strip('/') or parts.query else ''}"


def explain_status(status: int, text: str) -> str:
    """
    What to do about an answer that is no success.
    """
    said = f" ({text})" if text else ""
    if status in {401, 403}:
        return f"it answers {status}: it does not take the credentials; set password_file or bearer_token_file of this receiver to the right ones"
    if 300 <= status < 400:
        return f"it answers {status}, a redirect, and those are not followed: set the address that it leads to"
    if status in {404, 405}:
        return f"it answers {status}: see that the address of this receiver is right"
    if status == 429:
        return "it answers 429: it takes no more for now"
    return f"it answers {status}{said}"


def explain(error: httpx2.HTTPError) -> str:
    """
    What to do about a receiver that cannot be reached.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({cause.verify_message}): set ca_file of this receiver to the authority that issued it, or have it issued for this address"
        if isinstance(cause, ssl.SSLError):
            return (
                f"TLS failed ({cause.reason or 'unknown reason'}): if it has no TLS, write http:// before its address"
            )
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx2.TimeoutException):
        return "no answer in time: it is overloaded, or a firewall drops the connection"
    if isinstance(error, httpx2.ProxyError):
        return "the proxy that the environment names does not let it through: see HTTPS_PROXY and NO_PROXY"
    if isinstance(error, httpx2.ConnectError):
        return "connection refused, no route, or no such name: see that it runs and listens on this address"
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError | httpx2.WriteError):
        return "it ended the connection without an answer: if it has TLS, write https:// before its address"
    return f"it could not be asked ({type(error).__name__})"
