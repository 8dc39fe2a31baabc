"""
Our own and vendored files: addresses that change with the content, so that browsers may keep them for good.
"""

import hashlib
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

DIGEST_CHARACTERS = 12


class Assets:
    """
    Addresses of static files.
    """

    def __init__(self, static_dir: Path) -> None:
        self._static_dir = static_dir
        self._urls: dict[str, str] = {}

    def url(self, path: str) -> str:
        """
        Address of the file at `path` below the static folder.

        Raises:
            FileNotFoundError: there is no such file; a template names one that was never written.

        """
        if path not in self._urls:
            digest = hashlib.sha256((self._static_dir / path).read_bytes()).hexdigest()[:DIGEST_CHARACTERS]
            self._urls[path] = f"/static/{path}?v={digest}"
        return self._urls[path]


class VersionedStaticFiles(StaticFiles):
    """
    Static files that may be kept for a year when asked for by an address of `Assets`, and are checked each time if not.
    """

    async def get_response(self, path: str, scope: Scope) -> Response:
        """
        Serve a file with the caching that its address allows.
        """
        response = await super().get_response(path, scope)
        query: Any = scope.get("query_string", b"")
        kept = query.startswith(b"v=") and response.status_code == 200
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if kept else "no-cache"
        return response
