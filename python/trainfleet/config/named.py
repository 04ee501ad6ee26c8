"""What a row of a table names, so that a table is read without loading what it names."""

from __future__ import annotations

import importlib
from typing import Any


def named(name: str) -> Any:
    """What `package.module:name` is. ImportError or AttributeError where it is not there."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
