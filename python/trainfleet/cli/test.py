"""make test: the tests that pass in minutes; the slow ones are `make drills`."""

from __future__ import annotations

from ..processes import run_module
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    return run_module("pytest", "-q")
