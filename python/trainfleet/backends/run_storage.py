"""Access to a run's folder from this machine: all of its traffic between machines goes through a
Place.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, Self

from ..config import Config
from ..health.lease import is_renewed, require_vacant
from ..run import launch_intent as intents
from ..run.launch_intent import DeclaredIntent, Intent
from ..run.run_folder import Run, is_locked


class Place(Protocol):
    """The place of a run's folder, as a context that closes its connections. The local run folder
    has the state of the last `refresh`.

    words         " on this machine", " on the fleet": printed after "is not running"
    pace          seconds between two useful refreshes
    lag           most seconds by which the ranks' state here may be old
    lead          makes this process the run's launcher: its files go where nodes see them, with
        each
                  refresh; BackendError if another launcher leads
    refresh       brings the run folder here up to date; BackendError if no machine that has it
        answers
    supplement    brings the engine's record of nodes without a log into a folder, the run's or its
                  dataset's; BackendError if the engine does not answer
    is_running    tells whether a launcher led the run at the last refresh
    declare       writes the intent of a launch there, in place of the one with the token `stale`;
                  returns any other intent
    declared      returns the intent that is there now, or None. `touch` renews our own
    withdraw      removes this intent; if the run has not `begun`, also the request to stop, which
                  was obeyed
    ask_to_stop   writes the request that ranks check at every step
    folders       returns the run's folders there that are not here: folder → bytes
    remove        deletes such folders, of a dataset's only the program's files; returns the
        remaining
                  files of others
    forward       runs a verb that needs the run's files where these are, and shows its output here;
                  returns its exit code, or None if the files are here. `config` is the run's
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
    def declare(self, intent: Intent, stale: str = "") -> DeclaredIntent | None: ...
    def declared(self, touch: bool = False) -> DeclaredIntent | None: ...
    def withdraw(self, intent: Intent, begun: bool) -> None: ...
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

    def declare(self, intent: Intent, stale: str = "") -> DeclaredIntent | None:
        return intents.leave(self.run, intent, stale)

    def declared(self, touch: bool = False) -> DeclaredIntent | None:
        if touch:
            intents.touch(self.run)
        return intents.read(self.run)

    def withdraw(self, intent: Intent, begun: bool) -> None:
        intents.withdraw(self.run, intent, begun)

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
