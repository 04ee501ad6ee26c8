"""Access to a run's folder from this machine: all of its traffic between machines goes through a
Place.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, Self

from ..config import Config
from ..health.lease import (
    Launching,
    is_renewed,
    read_launching,
    require_vacant,
    show_launching,
)
from ..run.run_folder import Run, is_locked


class Place(Protocol):
    """The place of a run's folder, as a context that closes its connections. The local run folder
    has the state of the last `refresh`.

    words         " on this machine", " on the fleet": said after "is not running"
    pace          seconds between two refreshes that are worth it
    lag           seconds that what is seen of ranks may be old
    lead          this process launches the run: what it writes goes where nodes see it, with each
                  refresh; BackendError when
                  another launcher is at work
    refresh       brings the run folder up to date here; BackendError when no machine that has it
                  answers
    supplement    brings into a folder, the run's or its dataset's, what the engine keeps of nodes
                  that left no log there;
                  BackendError when it does not answer
    is_running    whether a launcher was at work on the run at the last refresh
    launching     the launch that is shown there now; None where there is none
    show          shows there that a launch is under way, or that none is; `obeyed`: and withdraws
                  requests to stop
    ask_to_stop   leaves the request that ranks look for at every step
    folders       what the run has there and not here: folder → bytes
    remove        deletes such folders, of a dataset's only what the program wrote; what it left, as
                  it is somebody else's
    forward     the exit code of a verb that needs what a run has made, carried out where that is,
                with its words shown here;
                  None where it is to be had here. `config` is the run's
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
    """A run of this machine, with its only copy here."""

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
    """A run on the head of a fleet, in the folder that all hosts see: any of them may lead it, one
    at a time (health/lease.py).
    """

    def lead(self) -> None:
        require_vacant(self.run.folder)

    def is_running(self) -> bool:
        return is_renewed(self.run.folder)
