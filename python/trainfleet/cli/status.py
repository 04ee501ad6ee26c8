"""make status: how the run stands, from its folder alone; of a fleet that can't be reached, as it was last seen."""

from __future__ import annotations

from ..errors import BackendError
from ..launch.settings import run_named
from ..launch.whereabouts import place_of
from ..report.summary import status
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    run = run_named(variables)
    try:
        with place_of(variables) as place:
            place.refresh()
    except BackendError:
        if run.results.exists():
            print(
                f"{status(run)}\nthat is how it was last seen, {(started - run.results.stat().st_mtime) / 60:.0f} min ago",
                flush=True,
            )
        raise
    print(status(run))
    return 0
