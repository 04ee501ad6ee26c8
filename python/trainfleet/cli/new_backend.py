"""make new-backend NAME=x: writes a package that adds a backend, with the bench that tests its
conformance.
"""

from __future__ import annotations

from pathlib import Path

from ..backends import skeleton
from ..trust.errors import ConfigError
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if "NAME" not in variables:
        raise ConfigError.of(
            "NAME", "must name the backend", next="make new-backend NAME=kubernetes"
        )
    name = variables["NAME"]
    files = skeleton.write(name, Path())
    print("\n".join(["wrote", *(f"  {file}" for file in files)]))
    print(
        f"next: .venv/bin/python -m pip install --no-deps -e {files[0].parent}; make plan "
        f"SET='fleet.backend={name}'"
    )
    return 0
