"""
The exporter's HTTP interface, as the server uses it.
"""

import json
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

Answer = TypeVar("Answer", bound=BaseModel)


class ExporterError(Exception):
    """
    An exporter that cannot be reached or understood; the message names the remedy.
    """


class CursorVoidError(ExporterError):
    """
    The exporter does not know the cursor: ask again without one.
    """


def create_client(transport: httpx2.AsyncBaseTransport | None = None) -> httpx2.AsyncClient:
    """
    The HTTP client for all exporters. Proxies of the environment are not for them.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(
        transport=transport,
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


async def send_command(client: httpx2.AsyncClient, url: str, token: str, command: ControlCommand) -> ControlResult:
    """
    Put a command; refusal is a result, not an error.

    Raises:
        ExporterError: it cannot be reached or understood.

    """
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
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
    if isinstance(error, httpx2.ConnectError):
        return "connection refused or no route: see that rankscope-exporter runs there and listens on this address"
    if isinstance(error, httpx2.TimeoutException):
        return f"no answer within {TIMEOUT_SECONDS:g} s: the node is overloaded, or a firewall drops the connection"
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
