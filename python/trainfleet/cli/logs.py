"""make logs: the last lines that each node wrote; FOLLOW=1 stays until the run ends."""

from __future__ import annotations

import re
import time
from pathlib import Path

from ..backends.place import Place
from ..errors import RunError
from ..launch.settings import run_named
from ..launch.whereabouts import place_of
from ..runs import Run, whole_lines
from .variables import Variables, flag

LINES = 20
TAIL = 2**18  # bytes in which these are looked for
NAME = re.compile(r"node-([0-9]{1,9})\.log")


def main(variables: Variables, started: float) -> int:
    run, follow = run_named(variables), flag(variables, "FOLLOW")
    with place_of(variables) as place:
        place.refresh()
        if follow and not run.logs.is_dir():
            _await(place, run.logs)
        ends = {log: log.stat().st_size for log in _logs(run)}
        if not ends:
            raise RunError("no logs yet", where=str(run.logs), why="no node of this run has started", next="make train")
        ends = {log: _print_new(log, max(0, end - TAIL), LINES) for log, end in ends.items()}
        while follow:
            alive = place.is_running()  # before the look at the logs, so that the last words are not missed
            ends = {log: _print_new(log, ends.get(log, 0)) for log in _logs(run)}
            if not alive:
                break
            time.sleep(place.pace)
            place.refresh()
    return 0


def _logs(run: Run) -> list[Path]:
    """The nodes' logs in the order of the nodes."""
    named = {path: match for path in run.logs.glob("node-*.log") if (match := NAME.fullmatch(path.name)) and path.is_file()}
    return sorted(named, key=lambda path: int(named[path][1]))


def _await(place: Place, logs: Path) -> None:
    """Waits for the first log of a run that is about to start its ranks."""
    while place.is_running() and not logs.is_dir():
        time.sleep(place.pace)
        place.refresh()


def _print_new(log: Path, end: int, most: int = 0) -> int:
    """Prints the whole lines behind `end`, of many the last `most`; where they end."""
    lines, end = whole_lines(log, end)
    for line in lines[-most:]:
        print(f"{log.stem}  {line.decode(errors='replace')}", flush=True)
    return end
