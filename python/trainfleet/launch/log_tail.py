"""Fetches the logs of a run's nodes and prints them as they grow.

Of a node of AWS Batch or SageMaker that left none, as its container died before the entrypoint or
can't write to S3, it is what the engine has kept, engine-<i>.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from ..backends.run_storage import Place
from ..run.run_folder import Run, whole_lines
from ..trust.errors import BackendError

NAME = re.compile(r"(?:node|engine)-([0-9]{1,9})\.log")


def look(place: Place, run: Run) -> BackendError | None:
    """Brings what is new; what the engine keeps is brought too, and may be closed to these
    credentials.
    """
    place.refresh()
    try:
        place.supplement(run.folder)
    except BackendError as error:
        return error
    return None


def logs_of(run: Run) -> list[Path]:
    """The nodes' logs in the order of the nodes."""
    found = [*run.logs.glob("node-*.log"), *run.logs.glob("engine-*.log")]
    named = {
        path: match for path in found if (match := NAME.fullmatch(path.name)) and path.is_file()
    }
    return sorted(named, key=lambda path: int(named[path][1]))


def await_first(place: Place, run: Run) -> BackendError | None:
    """Waits for the first log of a run that is about to start its ranks."""
    trouble = None
    while place.is_running() and not logs_of(run):
        time.sleep(place.pace)
        trouble = look(place, run)
    return trouble


def print_new(log: Path, end: int, most: int = 0) -> int:
    """Prints the whole lines behind `end`, of many the last `most`; where they end."""
    lines, end = whole_lines(log, end)
    for line in lines[-most:]:
        print(f"{log.stem}  {line.decode(errors='replace')}", flush=True)
    return end
