"""Reads the program's tables, YAML files next to the code that reads them, and loads the objects
that their rows name.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml


def read_table(path: Path) -> Any:
    """Reads such a file, with the parser in C if PyYAML was built with it: the other takes six
    times as long.
    """
    return yaml.load(
        path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )


def named(name: str) -> Any:
    """Loads `package.module:name`. ImportError or AttributeError if it is missing."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
