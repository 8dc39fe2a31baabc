"""
What all tests share: options, and what the report says about the environment.
"""

import os

import pytest

REQUIRE_ALL = "RANKSCOPE_REQUIRE_ALL"
"""
With this set to 1, a test that was skipped fails the run: what was not tested must not look as if it had been.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="write golden files anew instead of comparing with them"
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """
    Turn skips into a failure where nothing may be skipped.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", [])) if reporter else 0
    if skipped and os.environ.get(REQUIRE_ALL) == "1":
        reporter.write_line("")
        reporter.write_line(
            f"{skipped} skipped, and {REQUIRE_ALL}=1 allows none: install what the skips name", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew."""
    return bool(request.config.getoption("--update-goldens"))
