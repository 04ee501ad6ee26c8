"""In CI (REQUIRE_ALL=1) a test that skips has failed: what it needs must be there."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import Any

import pytest

# `make test` leaves these in the environment; the make of a user that a test plays starts without them.
for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKECMDGOALS"):
    os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and os.environ.get("REQUIRE_ALL") == "1" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped, which is a failure here: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}"
        )
    return report


@pytest.fixture(scope="session")
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line that is wanted of a test that passes too: a table of what it measured."""
    capture: Any = request.config.pluginmanager.get_plugin("capturemanager")

    def tell(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    return tell
