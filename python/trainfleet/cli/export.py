"""make export: the newest checkpoint as a Hugging Face folder, OUT."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..errors import ConfigError, Problem
from ..processes import die_with_parent
from ..runs import Run
from .settings import run_started
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if "OUT" not in variables:
        raise ConfigError([Problem(0, "OUT", "", "says which folder to make")], next="make export OUT=my-model")
    return export(run_started(variables), variables["OUT"])


def export(run: Run, out: str | Path) -> int:
    """Makes the folder in a process of its own, as the control plane never loads torch; its exit code."""
    command = [sys.executable, "-m", "trainfleet.engine.export", str(run.folder), str(out)]
    return subprocess.run(command, preexec_fn=die_with_parent, check=False).returncode
