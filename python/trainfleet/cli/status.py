"""make status: the state of the run, from its folder, and why its job waits, from the engine.

For a fleet that can't be reached, it prints the last known state.
"""

from __future__ import annotations

from ..launch import launching, run_location
from ..launch.command import run_named
from ..report.summary import status
from ..trust.errors import BackendError
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    run = run_named(variables)
    try:
        with run_location.place_of(variables) as place:
            place.refresh()
            # is_running would ask again an engine that does not answer.
            heard = run_location.heard_now(run, variables)
            led, begun = heard is None or place.is_running(), launching.under_way(place)
            alone = "" if led or begun else run_location.orphan_note(run, variables)
            alone = f"\nit is being launched: {begun}" if begun and not led else alone
    except BackendError:
        if run.results.exists():
            minutes = (started - run.results.stat().st_mtime) / 60
            print(f"{status(run)}\nthis is its state of {minutes:.0f} min ago", flush=True)
        raise
    print(status(run, heard or "") + alone)
    return 0
