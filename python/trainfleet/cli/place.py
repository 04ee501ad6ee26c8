"""Where a run is at work, for the verbs that look at it: on this machine, or on a fleet that has its folder."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Protocol

from ..config import Config, load, load_resolved
from ..errors import ConfigError
from ..runs import Run, is_locked
from .settings import run_named, settings_of
from .variables import Variables

if TYPE_CHECKING:
    from .away import Away


class Place(Protocol):
    """A run's whereabouts; `refresh` brings its files up to date here before they are read."""

    words: str
    look_every: float  # seconds

    def refresh(self) -> None: ...
    def is_running(self) -> bool: ...
    def ask_to_stop(self) -> None: ...
    def end_all(self) -> None: ...  # nothing of the run is left running, or BackendError
    def far_folders(self) -> dict[str, int]: ...  # what the run has where it is at work, if that is not here: folder → bytes
    def remove_far(self, folders: Iterable[str]) -> None: ...


class Here:
    """A run of this machine: its folder is the truth."""

    words, look_every = " on this machine", 0.3

    def __init__(self, run: Run) -> None:
        self.run = run

    def refresh(self) -> None: ...

    def is_running(self) -> bool:
        return is_locked(self.run.folder)

    def ask_to_stop(self) -> None:
        self.run.stop.touch()

    def end_all(self) -> None: ...

    def far_folders(self) -> dict[str, int]:
        return {}

    def remove_far(self, folders: Iterable[str]) -> None: ...


def place_of(variables: Variables) -> AbstractContextManager[Here | Away]:
    """The place of the run that the config names; a context, which closes what it opened."""
    run = run_named(variables)
    config = config_of(run, variables)
    if config is None or not config.fleet.reached_by_ssh or not config.fleet.hosts:  # without hosts it has run nowhere yet
        return nullcontext(Here(run))
    from .away import Away  # loads SSH

    return Away(config, run)


def config_of(run: Run, variables: Variables) -> Config | None:
    """The run's own config; where there is none, or one of another version of this, the file's; None when neither can be read."""
    if run.config.exists():
        with suppress(ConfigError):
            config = load_resolved(run.config)
            if config.name == run.name:  # else it is another run's, and so is what would be asked and removed by it
                return config
    with suppress(ConfigError):  # a look needs none
        return load(settings_of(variables))[0]
    return None
