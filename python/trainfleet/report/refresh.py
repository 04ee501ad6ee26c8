"""Keeps report.html up to date during a run, from a separate process with the lowest priority.

`python -m trainfleet.report.refresh RUN_FOLDER` renders the report once and exits, so its errors do
not affect the launcher.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ..process.processes import die_with_parent
from ..run.run_folder import Run
from ..trust.errors import telling
from ..trust.safe_output import run_program
from .html import write

# Seconds before the first rendering, and between renderings. Each takes about 1.5 s of one core.
FIRST, EVERY = (10.0, 20.0)


class Refresh:
    """Background process that renders the report. `look` starts another rendering if one is due and
    the run has new metrics.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.drawn, self.due = run, 0, time.monotonic() + FIRST
        self.process: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Starts a rendering if one is due, and otherwise costs at most one stat call. If the
        process can't start, the page is not updated.
        """
        if time.monotonic() < self.due or (self.process and self.process.poll() is None):
            return
        self.due = time.monotonic() + EVERY
        with suppress(OSError):
            if (changed := self.run.metrics.stat().st_mtime_ns) != self.drawn:
                self.drawn, self.process = changed, _start(self.run)

    def close(self) -> None:
        """Kills a rendering in progress, because the final report supersedes it."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _start(run: Run) -> subprocess.Popen[bytes]:
    def prepare() -> None:
        die_with_parent()
        os.nice(19)

    words = [sys.executable, "-m", __name__, str(run.folder)]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        words,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        preexec_fn=prepare,
        start_new_session=True,
    )


@telling
def main(arguments: list[str]) -> int:
    write(Run(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    run_program(main)
