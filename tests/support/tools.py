"""
Programs that tests need and that are no Python packages.
"""

import os
import shutil

import pytest


def need(tool: str, package: str) -> str:
    """The path of a tool; without it the test is skipped, or fails where nothing may be missing."""
    path = shutil.which(tool)
    if path is None:
        message = f"{tool} is missing: apt-get install {package}"
        if os.environ.get("RANKSCOPE_REQUIRE_ALL"):
            pytest.fail(message)
        pytest.skip(message)
    return path
