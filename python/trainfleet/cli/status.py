"""make status: how the run stands, from its folder alone; of a fleet that can't be reached, as it was last seen."""

from __future__ import annotations

from ..errors import BackendError
from ..launch import whereabouts
from ..launch.settings import run_named
from ..report.summary import status
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    run = run_named(variables)
    try:
        with whereabouts.place_of(variables) as place:
            place.refresh()
            alone = "" if place.is_running() else whereabouts.orphan_note(run, variables)
    except BackendError:
        if run.results.exists():
            minutes = (started - run.results.stat().st_mtime) / 60
            print(f"{status(run)}\nthat is how it was last seen, {minutes:.0f} min ago", flush=True)
        raise
    print(status(run) + alone)
    return 0
