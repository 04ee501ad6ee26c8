"""make logs: the last lines that each node wrote; FOLLOW=1 stays until the run ends."""

from __future__ import annotations

import time
from pathlib import Path

from ..errors import RunError
from ..runs import is_locked
from .settings import run_named
from .variables import Variables, flag

LINES = 20


def main(variables: Variables, started: float) -> int:
    run, follow = run_named(variables), flag(variables, "FOLLOW")
    if follow and not run.logs.is_dir():
        _await(run.folder, run.logs)
    logs = sorted(run.logs.glob("node-*.log"), key=lambda path: int(path.stem.split("-")[1]))
    if not logs:
        raise RunError("no logs yet", where=str(run.logs), why="no node of this run has started", next="make train")
    ends = {log: log.stat().st_size for log in logs}
    for log in logs:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]:
            print(f"{log.stem}  {line}")
    while follow:
        alive = is_locked(run.folder)  # before the look at the logs, so that the last words are not missed
        ends = {log: _print_new(log, end) for log, end in ends.items()}
        if not alive:
            break
        time.sleep(0.3)
    return 0


def _await(folder: Path, logs: Path) -> None:
    """Waits for the first log of a run that is about to start its ranks."""
    while is_locked(folder) and not logs.is_dir():
        time.sleep(0.3)


def _print_new(log: Path, end: int) -> int:
    """Prints the whole lines behind `end`; where they end."""
    with open(log, "rb") as file:
        file.seek(end)
        chunk = file.read()
    whole = chunk[: chunk.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        print(f"{log.stem}  {line}", flush=True)
    return end + len(whole)
