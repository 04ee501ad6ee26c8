"""make stop: asks the running launcher, from any terminal, for a clean stop, and waits until nothing runs."""

from __future__ import annotations

from ..launch import whereabouts
from ..launch.settings import run_named
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    run = run_named(variables)
    with whereabouts.place_of(variables) as place:
        place.refresh()
        if not place.is_running():
            print(f"{run.name} is not running{place.words}; nothing to stop")
            return 0
        whereabouts.stop(place, run, started)
    print("stopped; nothing runs any more\nnext: make train resumes it")
    return 0
