"""make status: how the run stands, from its folder, and why its job waits, from the engine.

Of a fleet that can't be reached: as it was last seen.
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
            # An engine that is silent now would be asked by is_running again.
            heard = run_location.heard_now(run, variables)
            led, begun = heard is None or place.is_running(), launching.under_way(place)
            alone = "" if led or begun else run_location.orphan_note(run, variables)
            alone = f"\nit is being launched: {begun}" if begun and not led else alone
    except BackendError:
        if run.results.exists():
            minutes = (started - run.results.stat().st_mtime) / 60
            print(f"{status(run)}\nthat is how it was last seen, {minutes:.0f} min ago", flush=True)
        raise
    print(status(run, heard or "") + alone)
    return 0
