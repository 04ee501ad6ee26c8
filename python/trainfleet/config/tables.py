"""Reads data tables (YAML files next to their modules), and imports objects by dotted name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml


def read_table(path: Path) -> Any:
    """Reads a YAML table.

    Uses PyYAML's C parser if available, because the Python parser takes six times as long.
    """
    return yaml.load(
        path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )


def named(name: str) -> Any:
    """Imports `package.module:name`. Raises ImportError or AttributeError if it does not exist."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
