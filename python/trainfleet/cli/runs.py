"""make runs: all runs here, one line each: state, step, loss, speed, cost, age."""

from __future__ import annotations

from ..report import listing
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    found = listing.known()
    if not found:
        print("no runs here yet\nnext: make train")
        return 0
    print("\n".join(listing.describe_runs(found)))
    print("\nnext: make status RUN=name, make logs RUN=name, make compare RUNS='one another', make clean RUN=name PURGE=1")
    return 0
