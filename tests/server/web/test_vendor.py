"""
What is vendored is what was published.
"""

import hashlib
from pathlib import Path

import pytest
import tomllib

VENDOR = Path(__file__).parents[3] / "server" / "rankscope_server" / "static" / "vendor"
LISTED = tomllib.loads((VENDOR / "VENDOR.toml").read_text())["file"]


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: entry["path"])
def test_checksum(entry: dict[str, str]) -> None:
    """A vendored file has the checksum that the list gives it."""
    assert hashlib.sha256((VENDOR / entry["path"]).read_bytes()).hexdigest() == entry["sha256"]


def test_list_is_complete() -> None:
    """Every file in the folder is listed, with where it comes from and under which licence."""
    assert {path.name for path in VENDOR.iterdir()} == {entry["path"] for entry in LISTED} | {"VENDOR.toml"}
    assert all({"package", "version", "licence", "source"} <= entry.keys() for entry in LISTED)


def test_versions_are_one_per_package() -> None:
    """Files of one package are of one release: htmx and its extensions, too."""
    versions: dict[str, set[str]] = {}
    for entry in LISTED:
        versions.setdefault(entry["package"], set()).add(entry["version"])

    assert all(len(found) == 1 for found in versions.values())
