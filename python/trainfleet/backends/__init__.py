"""Where a job can run. Nothing outside this folder asks which backend it has."""

from __future__ import annotations

from ..errors import ConfigError, Problem
from .base import Backend
from .local import Local

BACKENDS: dict[str, type[Backend]] = {"local": Local}


def backend_of(name: str) -> Backend:
    """The backend called `name`; one that is not built yet is refused here, by name, and nothing stands in for it."""
    if name not in BACKENDS:
        message = f"the {name} backend is not built yet; built: {', '.join(BACKENDS)}"
        raise ConfigError([Problem(0, "", "fleet.backend", message)], next="make train SET='fleet.backend=local'")
    return BACKENDS[name]()
