"""Access to run folders from this machine.

All run data that moves between machines passes through a Place.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, Self

from ..config import Config
from ..health.lease import (
    Holder,
    Launching,
    is_held,
    is_renewed,
    led_already,
    read_holder,
    read_launching,
    require_vacant,
    show_launching,
)
from ..process.processes import identity
from ..run.run_folder import Run, is_locked


class Place(Protocol):
    """Location of a run folder. As a context manager, it closes its connections on exit.

    The local run folder reflects the last `refresh`.

    words       text after "is not running", such as " on this machine" or " on the fleet"
    pace        minimum useful interval between refreshes, in seconds
    lag         maximum delay of the ranks' state in the local copy, in seconds
    lead        makes this process the run's launcher, so that each refresh uploads its files;
                raises BackendError if another launcher leads
    refresh     updates the local run folder; raises BackendError if no machine with the run folder
                responds
    supplement  downloads the scheduler's logs of nodes that have no log, into the folder of the run
                or its dataset; raises BackendError if the scheduler does not respond
    is_running  returns whether a launcher led the run at the last refresh
    launching   returns the launch record at this location, or None
    show        writes the launch record, or clears it if no launch is active; with `obeyed`, also
                clears the stop request
    ask_to_stop writes the stop request, which ranks check at every step
    folders     returns the run's folders on other machines: folder → bytes
    remove      deletes these folders, but in a dataset only the program's files; returns the files
                that remain
    forward     runs a verb where the run's files are, and prints its output here; returns its exit
                code, or None if the files are on this machine. `config` is the run's config
    """

    words: str
    pace: float
    lag: float

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def lead(self) -> None: ...
    def refresh(self) -> None: ...
    def supplement(self, folder: Path) -> None: ...
    def is_running(self) -> bool: ...
    def launching(self) -> Launching | None: ...
    def show(self, launching: Launching | None, obeyed: bool = False) -> None: ...
    def ask_to_stop(self) -> None: ...
    def folders(self) -> dict[str, int]: ...
    def remove(self, folders: Iterable[str]) -> list[str]: ...
    def forward(self, verb: str, config: Config, variables: dict[str, str]) -> int | None: ...


class Here:
    """Run that exists only on this machine."""

    words, pace, lag = " on this machine", 0.3, 0.0

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def lead(self) -> None: ...

    def refresh(self) -> None: ...

    def supplement(self, folder: Path) -> None: ...

    def is_running(self) -> bool:
        return is_locked(self.run.folder)

    def launching(self) -> Launching | None:
        return read_launching(self.run)

    def show(self, launching: Launching | None, obeyed: bool = False) -> None:
        show_launching(self.run, launching, obeyed)

    def ask_to_stop(self) -> None:
        self.run.ask_to_stop()

    def folders(self) -> dict[str, int]:
        return {}

    def remove(self, folders: Iterable[str]) -> list[str]:
        return []

    def forward(self, verb: str, config: Config, variables: dict[str, str]) -> int | None:
        return None


class OnHead(Here):
    """Run on a fleet's head, in the folder that all hosts share.

    Any host can lead it, but only one at a time (health/lease.py).
    """

    def lead(self) -> None:
        require_vacant(self.run.folder)

    def is_running(self) -> bool:
        return is_renewed(self.run.folder)


class Shared(Here):
    """Run in a Slurm cluster's shared folder.

    `has_job` returns whether the scheduler has an active job for the run.
    """

    # Lustre and NFS can take several seconds to show writes from other machines
    words, pace, lag = (" on the cluster", 1.0, 5.0)

    def __init__(self, run: Run, has_job: Callable[[], bool]) -> None:
        super().__init__(run)
        self.has_job = has_job

    def lead(self) -> None:
        """Raises BackendError if another launcher on any machine leads the run."""
        holder = read_holder(self.run.folder)
        if holder and _is_alive(self.run, holder):
            raise led_already(self.run.name, f"{self.run.folder}, launched on {holder.host}")

    def is_running(self) -> bool:
        holder = read_holder(self.run.folder)
        return (holder is not None and _is_alive(self.run, holder)) or self.has_job()


def _is_alive(run: Run, holder: Holder) -> bool:
    """Returns whether a live launcher holds the lease.

    A launcher on this machine counts as dead if its process does not exist. If the lease is not
    fresh, waits for a renewal.
    """
    if holder.host == platform.node() and holder.pid != os.getpid() and not identity(holder.pid):
        return False
    return is_held(holder, time.time()) or is_renewed(run.folder)
