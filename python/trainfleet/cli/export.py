"""make export: the newest checkpoint as a Hugging Face folder, OUT."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError, Problem
from ..processes import run_module
from ..runs import Run
from .settings import run_started
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if "OUT" not in variables:
        raise ConfigError([Problem(0, "OUT", "", "says which folder to make")], next="make export OUT=my-model")
    return export(run_started(variables), variables["OUT"])


def export(run: Run, out: str | Path) -> int:
    """Makes the folder; the exit code of the program that does."""
    return run_module("trainfleet.engine.export", str(run.folder), str(out))
