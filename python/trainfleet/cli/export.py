"""make export: the newest checkpoint as a Hugging Face folder, OUT."""

from __future__ import annotations

import subprocess
import sys

from ..errors import ConfigError, Problem
from ..processes import die_with_parent
from .settings import run_named
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if "OUT" not in variables:
        raise ConfigError([Problem(0, "OUT", "", "says which folder to make")], next="make export OUT=my-model")
    command = [sys.executable, "-m", "trainfleet.engine.export", str(run_named(variables).folder), variables["OUT"]]
    return subprocess.run(command, preexec_fn=die_with_parent, check=False).returncode  # the control plane never loads torch
