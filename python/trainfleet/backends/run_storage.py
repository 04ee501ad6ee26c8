"""Access to a run's folder from this machine. All traffic of a run between machines goes through a
Place.
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
    """Location of a run's folder, as a context manager that closes its connections. The local run
    folder has the state of the last `refresh`.

    words         " on this machine", " on the fleet": printed after "is not running"
    pace          seconds between two useful refreshes
    lag           most seconds by which the local copy of the ranks' state may be old
    lead          makes this process the run's launcher, so that each refresh sends its files to the
                  nodes; raises BackendError if another launcher leads
    refresh       updates the local run folder; raises BackendError if no machine that has the
                  run's folder answers
    supplement    copies the scheduler's record of nodes without a log into a folder, the run's or
                  its dataset's; raises BackendError if the scheduler does not answer
    is_running    tells whether a launcher led the run at the last refresh
    launching     returns the launch that is recorded there now, or None
    show          records there that a launch has begun, or that no launch is active; with `obeyed`,
                  also withdraws stop requests
    ask_to_stop   writes the stop request, which ranks check at every step
    folders       returns the run's folders that are not on this machine: folder → bytes
    remove        deletes those folders, but of a dataset only the program's files; returns the
                  remaining files of others
    forward       runs a verb where the run's files are, and shows its output here; returns its
                  exit code, or None if the files are here. `config` is the run's
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
    """A run with its only copy on this machine."""

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
    """A run on the head of a fleet, in the folder that all hosts share. Any host may lead it, one
    at a time (health/lease.py).
    """

    def lead(self) -> None:
        require_vacant(self.run.folder)

    def is_running(self) -> bool:
        return is_renewed(self.run.folder)


class Shared(Here):
    """A run in the shared folder. `has_job` tells whether the scheduler has an unfinished job of
    the run.
    """

    # Lustre and NFS show other machines' writes with a delay of some seconds.
    words, pace, lag = (" on the cluster", 1.0, 5.0)

    def __init__(self, run: Run, has_job: Callable[[], bool]) -> None:
        super().__init__(run)
        self.has_job = has_job

    def lead(self) -> None:
        """Raises BackendError while another launcher, on any machine, leads the run."""
        holder = read_holder(self.run.folder)
        if holder and _is_alive(self.run, holder):
            raise led_already(self.run.name, f"{self.run.folder}, launched on {holder.host}")

    def is_running(self) -> bool:
        holder = read_holder(self.run.folder)
        return (holder is not None and _is_alive(self.run, holder)) or self.has_job()


def _is_alive(run: Run, holder: Holder) -> bool:
    """Tells whether a launcher holds the lease. Checks its process if it runs on this machine, then
    the age of the lease or its next renewal.
    """
    if holder.host == platform.node() and holder.pid != os.getpid() and not identity(holder.pid):
        return False
    return is_held(holder, time.time()) or is_renewed(run.folder)
