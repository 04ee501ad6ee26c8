"""Where a job can run. Nothing outside this folder asks which backend it has."""

from __future__ import annotations

from collections.abc import Callable

from ..config import Config
from ..errors import ConfigError, Problem
from .base import Backend
from .local import Local
from .ssh import of as ssh_of

__all__ = ["BACKENDS", "Backend", "backend_of"]

BACKENDS: dict[str, Callable[[Config], Backend]] = {"local": Local, "ssh": ssh_of}


def backend_of(config: Config) -> Backend:
    """The backend that the config names.

    Raises:
        ConfigError: it does not launch jobs yet; what is not built at all, the config's rules have refused.
    """
    name = config.fleet.backend
    if name not in BACKENDS:
        message = f"the {name} backend sets machines up, but launches nothing yet; these do: {', '.join(BACKENDS)}"
        raise ConfigError([Problem(0, "", "fleet.backend", message)], next="make setup; make doctor")
    return BACKENDS[name](config)
