"""Reads the program's tables, which are YAML files next to their modules, and loads the objects
that their rows name.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml


def read_table(path: Path) -> Any:
    """Reads a table. It uses PyYAML's C parser if available, because the Python parser takes six
    times as long.
    """
    return yaml.load(
        path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )


def named(name: str) -> Any:
    """Loads `package.module:name`. Raises ImportError or AttributeError if it is missing."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
