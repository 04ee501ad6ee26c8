"""Where a job can run. Nothing outside this folder asks which backend it has."""

from __future__ import annotations

from .base import Backend
from .local import Local

__all__ = ["BACKENDS", "Backend", "backend_of"]

BACKENDS: dict[str, type[Backend]] = {"local": Local}


def backend_of(name: str) -> Backend:
    """The backend called `name`; the config's rules have refused any that is not built."""
    return BACKENDS[name]()
