"""make sample: the newest checkpoint continues PROMPT, token by token."""

from __future__ import annotations

import subprocess
import sys

from ..processes import die_with_parent
from .settings import run_started
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    run = run_started(variables)
    prompt = variables.get("PROMPT", "def ")
    # A process of its own: the control plane never loads torch. The prompt goes by the environment, as any text may be in it.
    command = [sys.executable, "-m", "trainfleet.engine.generate", str(run.folder), prompt]
    return subprocess.run(command, preexec_fn=die_with_parent, check=False).returncode
