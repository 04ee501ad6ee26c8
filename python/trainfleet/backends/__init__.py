"""Where a job can run. Nothing outside this folder asks which backend it has."""

from __future__ import annotations

from ..errors import ConfigError, Problem
from .base import Backend
from .local import Local

__all__ = ["BACKENDS", "Backend", "backend_of"]

BACKENDS: dict[str, type[Backend]] = {"local": Local}


def backend_of(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        ConfigError: it does not launch jobs yet; what is not built at all, the config's rules have refused.
    """
    if name not in BACKENDS:
        message = f"the {name} backend sets machines up, but launches nothing yet; these do: {', '.join(BACKENDS)}"
        raise ConfigError([Problem(0, "", "fleet.backend", message)], next="make setup; make doctor")
    return BACKENDS[name]()
