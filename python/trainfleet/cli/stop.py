"""make stop: asks the running launcher, from any terminal, for a clean stop, and waits until no
process runs.
"""

from __future__ import annotations

from ..launch import launching, run_location
from ..launch.command import run_named
from ..run.run_folder import Run
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    run = run_named(variables)
    with run_location.place_of(variables) as place:
        place.refresh()
        led = place.is_running()
        if not led and (begun := launching.under_way(place)):
            if launching.cancel(place, run, begun):
                run_location.end(variables)
                print(
                    f"the launch of {run.name} has ended, and none of its processes runs\nnext: "
                    "make train begins again"
                )
                return 0
            led = True
        if not led and not (alone := run_location.nodes_at_work(variables)):
            print(f"{run.name} is not running{place.words}; nothing to stop")
            return 0
        if not led:
            print(f"its launcher is gone, but {', '.join(alone)} still run", flush=True)
        calmly = run_location.stop(place, run, variables)
        if not calmly:
            print(
                f"no answer for {run_location.PATIENCE:.0f} s; ending its processes at once",
                flush=True,
            )
            run_location.end(variables)
            place.refresh()
            run_location.require_over(run)
    print(_ended(run, calmly))
    return 0


def _ended(run: Run, calmly: bool) -> str:
    """Returns the outcome of the run, and the next command."""
    if run.read_results().get("status") == "finished":
        return (
            f"{run.name} had finished before it could stop; no process runs any more\nnext: make "
            "report"
        )
    return (
        "stopped; no process runs any more\nnext: make train "
        f"{'resumes it' if calmly else 'resumes from the last checkpoint'}"
    )
