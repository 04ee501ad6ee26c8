"""A second head: `python -m trainfleet.watch.standby RUN_FOLDER COMMAND...` waits, and replaces the launcher if that dies.

The launcher is only a command that resumes (`make train`), so taking over is running it again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ..lease import PATIENCE, read_holder
from ..output import install
from ..processes import die_with_parent

LOOK_EVERY = 1.0
TYPE_AGAIN = 5.0
HOSTS_MAY_RETURN = 900.0  # seconds


def main(arguments: list[str]) -> int:
    die_with_parent()
    folder, *command = arguments
    if not vacant(Path(folder)):
        return 0
    print(f"the launcher has not been heard of for {PATIENCE:.0f} s; this host takes over", flush=True)
    return take_over(Path(folder), command)


def take_over(folder: Path, command: list[str]) -> int:
    """The exit code of the next launcher. While hosts are missing it can't begin, and is started again for HOSTS_MAY_RETURN."""
    before, deadline = read_holder(folder), time.monotonic() + HOSTS_MAY_RETURN
    while True:
        code = subprocess.run(command, preexec_fn=die_with_parent, check=False).returncode
        if read_holder(folder) != before or time.monotonic() > deadline:
            return code
        time.sleep(TYPE_AGAIN)


def vacant(folder: Path) -> bool:
    """True when the launcher falls silent in the middle of its work, False when it has finished.

    It counts polls and compares no clocks, so that a file system that pauses for a minute costs one poll and is no death.
    """
    silent, last = 0.0, read_holder(folder)
    while silent < PATIENCE:
        time.sleep(LOOK_EVERY)
        newest = read_holder(folder)
        if newest and newest.code is not None and last is not None and newest.time != last.time:
            return False
        silent = silent + LOOK_EVERY if newest == last else 0.0
        last = newest
    return last is not None and last.code is None  # a launcher that never took the lease has failed, and would again


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
