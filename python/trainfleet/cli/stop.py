"""make stop: asks the running launcher, from any terminal, for a clean stop, and waits until nothing runs."""

from __future__ import annotations

from ..launch import intending, whereabouts
from ..launch.settings import run_named
from ..runs import Run
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    run = run_named(variables)
    with whereabouts.place_of(variables) as place:
        place.refresh()
        led = place.is_running()
        if not led and (intent := intending.under_way(place)):
            if intending.cancel(place, run, intent):
                whereabouts.end(variables)
                print(f"the launch of {run.name} has ended, and nothing of it runs\nnext: make train begins again")
                return 0
            led = True
        if not led and not (alone := whereabouts.nodes_at_work(variables)):
            print(f"{run.name} is not running{place.words}; nothing to stop")
            return 0
        if not led:
            print(f"its launcher is gone, and {', '.join(alone)} go on without it", flush=True)
        calmly = whereabouts.stop(place, run, variables)
        if not calmly:
            print(f"nothing was heard for {whereabouts.PATIENCE:.0f} s; what runs is ended at once", flush=True)
            whereabouts.end(variables)
            place.refresh()
            whereabouts.require_over(run)
    print(_ended(run, calmly))
    return 0


def _ended(run: Run, calmly: bool) -> str:
    """What became of the run, and what to type."""
    if run.read_results().get("status") == "finished":
        return f"{run.name} had finished before it could stop; nothing runs any more\nnext: make report"
    return f"stopped; nothing runs any more\nnext: make train {'resumes it' if calmly else 'resumes from the last checkpoint'}"
