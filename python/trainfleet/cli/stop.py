"""make stop: asks the running launcher, from any terminal, for a clean stop, and waits until nothing runs."""

from __future__ import annotations

import time

from ..errors import RunError
from ..runs import is_locked
from .settings import run_named
from .variables import Variables

PATIENCE = 120.0  # seconds: a step and a checkpoint


def main(variables: Variables, started: float) -> int:
    run = run_named(variables)
    if not is_locked(run.folder):
        print(f"{run.name} is not running on this machine; nothing to stop")
        return 0
    run.stop.touch()
    print(f"asked {run.name} to stop at its next step, with a checkpoint", flush=True)
    while is_locked(run.folder):
        if time.time() - started > PATIENCE:
            why = f"no step boundary came within {PATIENCE:.0f} s"
            raise RunError(
                "it has not stopped yet",
                where=str(run.folder),
                why=why,
                next="make logs FOLLOW=1; Ctrl-C twice where it runs ends it at once",
            )
        time.sleep(0.2)
    print("stopped; nothing runs any more\nnext: make train resumes it")
    return 0
