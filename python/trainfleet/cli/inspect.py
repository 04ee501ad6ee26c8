"""make inspect: a sample of the training order as text; VERIFY=1 checks every file of the dataset first."""

from __future__ import annotations

import os
import subprocess
import sys

from ..config import dump_resolved, load
from ..errors import ConfigError, Problem
from ..processes import die_with_parent
from ..runs import run_of, write_atomic
from .settings import settings_of
from .variables import Variables, flag


def main(variables: Variables, started: float) -> int:
    sample = variables.get("SAMPLE", "0")
    if not sample.isdigit():
        raise ConfigError([Problem(0, "SAMPLE", "", f"must be a whole number from 0, not {sample!r}")])
    config, _ = load(settings_of(variables))
    path = run_of(config.name).folder / "inspected.yaml"
    write_atomic(path, dump_resolved(config))
    command = [sys.executable, "-m", "trainfleet.data.inspect", str(path), sample]
    environment = os.environ | {"VERIFY": "1" if flag(variables, "VERIFY") else "0"}
    try:
        return subprocess.run(command, env=environment, preexec_fn=die_with_parent, check=False).returncode
    finally:
        path.unlink()
