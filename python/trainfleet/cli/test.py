"""make test: the tests that take minutes; `make drills` runs the slow ones."""

from __future__ import annotations

from ..process.processes import run_module
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    # Runs four files at once, as tests wait half of the time, with one thread each, as threads of
    # several processes would wait for each other.
    at_once = ("--numprocesses=4", "--dist=loadfile", "--no-loadscope-reorder", "--durations=15")
    return run_module("pytest", "-q", "-m", "not thorough", *at_once, OMP_NUM_THREADS="1")
