"""make eval: loss, perplexity and accuracy of the newest checkpoint on the validation split."""

from __future__ import annotations

import subprocess
import sys

from ..processes import die_with_parent
from .settings import run_named
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    command = [sys.executable, "-m", "trainfleet.engine.evaluate", str(run_named(variables).folder)]
    return subprocess.run(command, preexec_fn=die_with_parent, check=False).returncode  # the control plane never loads torch
