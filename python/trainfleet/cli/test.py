"""make test: the tests that pass in minutes; the slow ones are `make drills`."""

from __future__ import annotations

from ..process.processes import run_module
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    # Four files at once, as half of the time tests wait; each with one thread: threads of several
    # processes wait for each other.
    at_once = ("--numprocesses=4", "--dist=loadfile", "--no-loadscope-reorder", "--durations=15")
    return run_module("pytest", "-q", "-m", "not thorough", *at_once, OMP_NUM_THREADS="1")
