"""make test: the tests that pass in minutes; the slow ones are `make drills`."""

from __future__ import annotations

from ..host.processes import run_module
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    # Two files at once, each with one thread, as most tests have: threads of two processes on two cores wait for each other.
    at_once = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")
    return run_module("pytest", "-q", "-m", "not thorough", *at_once, OMP_NUM_THREADS="1")
