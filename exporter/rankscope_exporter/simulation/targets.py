"""
The file that tells a server where the simulated deployments are watched.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """
    A deployment, the address of its exporter process, and the file with the token that allows control.
    """

    name: str
    role: str
    url: str
    token_file: Path


def render_targets(targets: Iterable[Target]) -> str:
    """
    The targets as YAML; strings are quoted as in JSON, which YAML reads alike.
    """
    lines = ["deployments:"]
    for target in targets:
        lines += [
            f"  - name: {json.dumps(target.name)}",
            f"    role: {json.dumps(target.role)}",
            f"    exporters: [{json.dumps(target.url)}]",
            f"    control_token_file: {json.dumps(str(target.token_file))}",
        ]
    return "\n".join(lines) + "\n"


def write_whole(path: Path, text: str) -> None:
    """
    Put `text` into `path` so that a reader sees all of it or nothing.

    Raises:
        OSError: it cannot be written.

    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
