"""A bench for the tests of a file: one dataset, and the runs that they make of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Bench


@pytest.fixture(scope="module")
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """Made as the file's BENCH says, or as ranks.py does; what runs here runs in its folder."""
    here = Path.cwd()
    yield Bench(tmp_path_factory.mktemp("bench"), **getattr(request.module, "BENCH", {}))
    os.chdir(here)
