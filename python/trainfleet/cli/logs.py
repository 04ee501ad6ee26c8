"""make logs: the last lines of each node; with FOLLOW=1 it stays until the run ends."""

from __future__ import annotations

import time

from ..launch.command import run_named
from ..launch.log_tail import await_first, logs_of, look, print_new
from ..launch.run_location import place_of
from ..trust.errors import RunError, tell
from .variables import Variables, flag

LINES = 20
TAIL = 2**18  # last bytes of a log that are searched for them


def main(variables: Variables, started: float) -> int:
    run, follow = run_named(variables), flag(variables, "FOLLOW")
    with place_of(variables) as place:
        trouble = look(place, run)
        if follow and not logs_of(run):
            trouble = await_first(place, run)
        ends = {log: log.stat().st_size for log in logs_of(run)}
        if trouble and not ends:
            raise trouble
        if not ends:
            raise RunError(
                "no logs yet",
                where=str(run.logs),
                why="no node of this run has started",
                next="make train",
            )
        ends = {log: print_new(log, max(0, end - TAIL), LINES) for log, end in ends.items()}
        while follow:
            # asked before the logs are read, so that the last lines are not missed
            alive = place.is_running()
            trouble = look(place, run) or trouble
            ends = {log: print_new(log, ends.get(log, 0)) for log in logs_of(run)}
            if not alive:
                break
            time.sleep(place.pace)
    if trouble:
        tell(trouble)
    return 0
