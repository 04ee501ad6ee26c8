"""What a test needs beyond Python: it skips with the reason and the install line, and under REQUIRE_ALL=1 (CI) it fails instead."""

from __future__ import annotations

import importlib
import os
import shutil
from types import ModuleType
from typing import NoReturn

import pytest


def need(module: str, install: str = "") -> ModuleType:
    """The imported module, or the end of the test."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing(
            f"{module} can't be imported ({error}); install it: {install or 'pip install ' + module}"
        )


def need_program(name: str, install: str) -> str:
    """The path of a program, or the end of the test."""
    return shutil.which(name) or missing(f"{name} is not on PATH; install it: {install}")


def missing(reason: str) -> NoReturn:
    """Ends the test: skipped, or failed where everything must be there."""
    if os.environ.get("REQUIRE_ALL") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)
