"""Templates for a package that adds a backend.

`make new-backend` writes the package. The generated backend can already plan jobs.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from ...run import run_folder
from ...trust.errors import ConfigError
from .. import BACKENDS

FORM = "[a-z][a-z0-9_]{0,30}"
FILES = Path(__file__).parent
PLACE, CLASS = "NAME", "CLASS"  # placeholders in the templates
MADE = {  # template → file in the package
    "pyproject.toml.txt": "pyproject.toml",
    "backend.py.txt": "src/trainfleet_NAME/__init__.py",
    "placement.py.txt": "src/trainfleet_NAME/placement.py",
    "bench.py.txt": "src/trainfleet_NAME/bench.py",
}


def require_name(name: str) -> None:
    """Raises ConfigError if `name` is not a valid name for a new backend."""
    problem = ""
    if not re.fullmatch(FORM, name):
        problem = f"must match {FORM}: lower-case letters, digits and _, like a Python module"
    elif keyword.iskeyword(name):
        problem = f"{name} is a Python keyword"
    elif name in [*BACKENDS]:
        problem = f"a backend named {name} already exists"
    if problem:
        raise ConfigError.of("NAME", problem, next="make new-backend NAME=kubernetes")


def write(name: str, where: Path) -> list[Path]:
    """Writes the package to a new folder in `where` and returns the files.

    Raises:
        ConfigError: the name is invalid, or the folder exists.
    """
    require_name(name)
    folder = where / f"trainfleet-{name}"
    if folder.exists():
        raise ConfigError.of(
            "NAME", f"{folder} already exists", next="set another NAME, or move the folder"
        )
    made = []
    for template, path in MADE.items():
        file = folder / path.replace(PLACE, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = (FILES / template).read_text(encoding="utf-8")
        run_folder.write_atomic(
            file,
            text.replace(PLACE, name).replace(
                CLASS, name.replace("_", " ").title().replace(" ", "")
            ),
        )
        made.append(file)
    return made
