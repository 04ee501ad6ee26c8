"""A lab of two nodes for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet.lab import Lab, lab


@pytest.fixture
def pair() -> Iterator[Lab]:
    with lab(2) as nodes:
        yield nodes
