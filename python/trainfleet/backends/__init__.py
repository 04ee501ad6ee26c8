"""Where a job can run. Nothing outside this folder asks which backend it has."""

from __future__ import annotations

from collections.abc import Callable

from ..config import Config
from .base import Backend
from .local import Local
from .ssh import of as ssh_of

__all__ = ["BACKENDS", "Backend", "backend_of"]

BACKENDS: dict[str, Callable[[Config], Backend]] = {"local": Local, "ssh": ssh_of}


def backend_of(config: Config) -> Backend:
    """The backend that the config names; what is not built, the config's rules have refused."""
    return BACKENDS[config.fleet.backend](config)
