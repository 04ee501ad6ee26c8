"""make stop: asks the running launcher, from any terminal, for a clean stop, and waits until nothing runs."""

from __future__ import annotations

import time

from ..errors import RunError
from ..runs import Run
from .place import Place, place_of
from .settings import run_named
from .variables import Variables

PATIENCE = 120.0  # seconds: a step and a checkpoint


def main(variables: Variables, started: float) -> int:
    run = run_named(variables)
    with place_of(variables) as place:
        place.refresh()
        if not place.is_running():
            print(f"{run.name} is not running{place.words}; nothing to stop")
            return 0
        end(place, run, started)
    print("stopped; nothing runs any more\nnext: make train resumes it")
    return 0


def end(place: Place, run: Run, started: float) -> None:
    """Has a run that is at work stop at its next step, and returns when it has.

    Raises:
        RunError: no step came in time.
    """
    place.ask_to_stop()
    print(f"asked {run.name} to stop at its next step, with a checkpoint", flush=True)
    while place.is_running():
        if time.time() - started > PATIENCE:
            why = f"no step boundary came within {PATIENCE:.0f} s"
            next = "make logs FOLLOW=1; Ctrl-C twice where it runs ends it at once"
            raise RunError("it has not stopped yet", where=str(run.folder), why=why, next=next)
        time.sleep(place.look_every)
        place.refresh()
