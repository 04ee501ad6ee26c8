"""Loads the object that a row of a table names, so that reading the table loads nothing else."""

from __future__ import annotations

import importlib
from typing import Any


def named(name: str) -> Any:
    """Loads `package.module:name`. ImportError or AttributeError if it is missing."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
