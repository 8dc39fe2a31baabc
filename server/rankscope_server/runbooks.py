"""
Runbooks, as text: what to do about an alert, from the server that raised it, without a network.
"""

import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from rankscope_server.domain.alert_notice import runbook_path

PACKAGE = Path(__file__).parent


def runbooks_dir() -> Path:
    """
    Where runbooks are: in the installed package, or in the documentation of a source tree.
    """
    installed = PACKAGE / "texts" / "runbooks"
    return installed if installed.is_dir() else PACKAGE.parent.parent / "docs" / "runbooks"


def read_runbook(name: str, directory: Path) -> str | None:
    """
    The runbook of an alert; None where there is none.
    """
    if re.fullmatch(r"[A-Za-z0-9]{1,64}", name) is None:
        return None
    try:
        return (directory / f"{name}.md").read_text(encoding="utf-8")
    except OSError:
        return None


def install_runbooks(app: FastAPI, directory: Path) -> None:
    """
    Serve runbooks by the names of alerts.
    """

    @app.get(runbook_path("") + "{name}", include_in_schema=False)
    async def runbook(name: str) -> PlainTextResponse:
        """
        A runbook.
        """
        text = read_runbook(name, directory)
        if text is None:
            return PlainTextResponse(f"There is no runbook {name}: `rankscope alert rules` lists the alerts.\n", 404)
        return PlainTextResponse(text)
