"""Reads the program's own tables: YAML files beside the code that reads them."""

from __future__ import annotations

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
