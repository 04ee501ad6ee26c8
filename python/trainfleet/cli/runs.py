"""make runs: all runs here, one line each: state, step, loss, speed, cost, age. With CONFIG: only
that config's.
"""

from __future__ import annotations

from ..launch import cleaning
from ..launch.command import run_named
from ..report import listing
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    found = listing.known()
    if variables:
        made = cleaning.made_by(run_named(variables), None)
        found = [run for run in found if run.folder in made]
    if not found:
        print(f"no runs {'of this config ' if variables else ''}here yet\nnext: make train")
        return 0
    print("\n".join(listing.describe_runs(found)))
    print(
        "\nnext: make status RUN=name, make logs RUN=name, make compare RUNS='one another', make "
        "clean RUN=name PURGE=1"
    )
    return 0
