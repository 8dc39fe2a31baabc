"""
The exporter's HTTP interface, as the server uses it.
"""

import json
import ssl
from typing import TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from rankscope_exporter.contract import (
    CONTROL_PATH,
    RANKS_PATH,
    REQUESTS_PATH,
    STEPS_MEDIA_TYPE,
    STEPS_PATH,
    ControlCommand,
    ControlResult,
    RanksAnswer,
    RequestsAnswer,
    StepsFrame,
)

MAX_ANSWER_BYTES = 64 << 20
TIMEOUT_SECONDS = 3.0

_ASK_FOR_READING = "it takes a read token: set read_token_file of this deployment to a file with the exporter's (RANKSCOPE_READ_TOKEN_FILE there)"
_REFUSED_FOR_READING = "it does not take the read token: give server and exporter the same one (read_token_file, RANKSCOPE_READ_TOKEN_FILE)"
_REMEDIES = {
    421: "it does not know itself by this name: set RANKSCOPE_ALLOWED_HOSTS there to the name in its address here",
    429: "it takes fewer requests than it is sent from this address: raise RANKSCOPE_REQUEST_RATE there; after wrong tokens, wait",
    503: "it has more connections than it takes: see who else asks it, or raise RANKSCOPE_MAX_CONNECTIONS there",
}
"""
What to do about answers that an exporter gives before it looks at a request.
"""
_NO_HTTPS = "if it has TLS, write https:// before its address"
_NO_CERTIFICATE = "if it asks for a certificate (RANKSCOPE_TLS_CLIENT_CA_FILE there), set client_cert_file and client_key_file of this deployment to a pair of that authority"
_WRONG_NAME = {62, 64}
"""
OpenSSL: the name, or the IP address, is not in the certificate.
"""
_EXPIRED = 10
"""
OpenSSL: the certificate has expired.
"""
_NO_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL"}
"""
OpenSSL: what came was no TLS.
"""

Answer = TypeVar("Answer", bound=BaseModel)


class ExporterError(Exception):
    """
    An exporter that cannot be reached or understood; the message names the remedy.
    """


class CursorVoidError(ExporterError):
    """
    The exporter does not know the cursor: ask again without one.
    """


def create_client(
    transport: httpx2.AsyncBaseTransport | None = None,
    *,
    auth: httpx2.Auth | None = None,
    tls: ssl.SSLContext | None = None,
) -> httpx2.AsyncClient:
    """
    The HTTP client for the exporters of a deployment. Proxies of the environment are not for them.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(
        transport=transport,
        auth=auth,
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if tls is None else tls,  # trusts nobody
        timeout=httpx2.Timeout(TIMEOUT_SECONDS),
        limits=limits,
        trust_env=False,
        follow_redirects=False,
    )


async def fetch_ranks(client: httpx2.AsyncClient, url: str) -> RanksAnswer:
    """
    Ask for `/v1/ranks`.

    Raises:
        ExporterError: it cannot be reached or understood.

    """
    return _parse(RanksAnswer, await _get(client, url, RANKS_PATH))


async def fetch_requests(client: httpx2.AsyncClient, url: str) -> RequestsAnswer:
    """
    Ask for `/v1/requests`.

    Raises:
        ExporterError: it cannot be reached or understood.

    """
    return _parse(RequestsAnswer, await _get(client, url, REQUESTS_PATH))


async def fetch_steps(client: httpx2.AsyncClient, url: str, cursor: str) -> StepsFrame:
    """
    Ask for the step records after `cursor`; empty for everything.

    Raises:
        CursorVoidError: the cursor is not known.
        ExporterError: it cannot be reached or understood.

    """
    data = await _get(client, url, STEPS_PATH, {"cursor": cursor} if cursor else {}, media_type=STEPS_MEDIA_TYPE)
    try:
        return StepsFrame.decode(data)
    except (ValueError, KeyError) as error:
        msg = f"{STEPS_PATH}: {_first_line(error)}"
        raise ExporterError(msg) from error


async def send_command(client: httpx2.AsyncClient, url: str, command: ControlCommand) -> ControlResult:
    """
    Put a command; refusal is a result, not an error.

    Raises:
        ExporterError: it cannot be reached or understood.

    """
    headers = {"Content-Type": "application/json"}
    try:
        response = await client.put(f"{url}{CONTROL_PATH}", content=command.model_dump_json(), headers=headers)
    except httpx2.HTTPError as error:
        raise ExporterError(_unreachable(error)) from error
    if response.status_code in {200, 202, 409}:
        return _parse(ControlResult, response.content)
    if response.status_code in {401, 403}:
        msg = "it does not take the token: give server and exporter the same one (control_token_file, RANKSCOPE_CONTROL_TOKEN_FILE)"
        raise ExporterError(msg)
    if response.status_code == 404:
        msg = "control is off there: start the exporter with RANKSCOPE_CONTROL_TOKEN_FILE set"
        raise ExporterError(msg)
    if remedy := _REMEDIES.get(response.status_code):
        raise ExporterError(remedy)
    msg = f"it answered {response.status_code} to the command: {response.text[:200]}"
    raise ExporterError(msg)


async def _get(
    client: httpx2.AsyncClient,
    url: str,
    path: str,
    params: dict[str, str] | None = None,
    *,
    media_type: str = "application/json",
) -> bytes:
    try:
        async with client.stream("GET", f"{url}{path}", params=params, headers={"Accept": media_type}) as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    msg = f"{path} answers with more than {MAX_ANSWER_BYTES >> 20} MiB: this is no exporter"
                    raise ExporterError(msg)
    except httpx2.HTTPError as error:
        raise ExporterError(_unreachable(error)) from error
    if response.status_code == 400 and params and params.get("cursor"):
        raise CursorVoidError(path)
    if response.status_code == 401:
        sent = "Authorization" in response.request.headers
        raise ExporterError(_REFUSED_FOR_READING if sent else _ASK_FOR_READING)
    if remedy := _REMEDIES.get(response.status_code):
        raise ExporterError(remedy)
    if response.status_code != 200:
        msg = f"{path} answers {response.status_code}: see that the address is that of rankscope-exporter, not of vLLM"
        raise ExporterError(msg)
    return bytes(body)


def _parse(kind: type[Answer], data: bytes) -> Answer:
    try:
        return kind.model_validate(json.loads(data))
    except (ValueError, ValidationError) as error:
        msg = f"its answer is not understood ({_first_line(error)}): exporter and server are of different versions, upgrade the older one"
        raise ExporterError(msg) from error


def _unreachable(error: httpx2.HTTPError) -> str:
    if (tls := _tls_error(error)) is not None:
        return explain_tls(tls)
    if isinstance(error, httpx2.ConnectError):
        return "connection refused or no route: see that rankscope-exporter runs there and listens on this address"
    if isinstance(error, httpx2.TimeoutException):
        return f"no answer within {TIMEOUT_SECONDS:g} s: the node is overloaded, or a firewall drops the connection"
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
        # In TLS 1.3 a client learns only after its first request that its certificate was not taken.
        return f"it ended the connection without an answer: {_NO_CERTIFICATE if error.request.url.scheme == 'https' else _NO_HTTPS}"
    return f"{type(error).__name__}: {_first_line(error)}"


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def explain_tls(error: ssl.SSLError) -> str:
    """
    What to do about an error of TLS.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _WRONG_NAME:
            return f"its certificate is for another name ({error.verify_message}): write the address as in the certificate, or have one issued for this address"
        if error.verify_code == _EXPIRED:
            return "its certificate has expired: give the exporter a new one (RANKSCOPE_TLS_CERT_FILE)"
        return f"its certificate is not trusted ({error.verify_message}): set ca_file of this deployment to the authority that issued it"
    reason = error.reason or str(error)
    if reason in _NO_TLS:
        return "it does not speak TLS: write http:// before its address, or give the exporter a certificate (RANKSCOPE_TLS_CERT_FILE)"
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return f"it does not take this server's certificate ({reason}): {_NO_CERTIFICATE}"
    return f"TLS failed ({reason})"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
