"""
What tests of the server share.
"""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Coroutines run on asyncio, as the server does."""
    return "asyncio"
