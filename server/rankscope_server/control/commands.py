"""
Giving one command to every exporter of an engine.
"""

from collections.abc import Mapping, Sequence

import anyio
import httpx2

from rankscope_exporter.contract import ControlCommand
from rankscope_server.ingest.client import ExporterError, send_command


async def send_everywhere(
    clients: Mapping[str, httpx2.AsyncClient], urls: Sequence[str], command: ControlCommand
) -> tuple[str, ...]:
    """
    Send `command` to all of `urls` at once, each by its client; what went wrong, by exporter, nothing if all took it.
    """
    errors: dict[str, str] = {}

    async def send(url: str) -> None:
        try:
            result = await send_command(clients[url], url, command)
            if not result.accepted:
                errors[url] = result.reason or "refused without a reason"
        except ExporterError as error:
            errors[url] = str(error)

    async with anyio.create_task_group() as tasks:
        for url in urls:
            tasks.start_soon(send, url)
    return tuple(f"{url}: {errors[url]}" for url in urls if url in errors)
