"""make test: the tests, in files of their own processes where the machine has cores for it."""

from __future__ import annotations

import subprocess
import sys

from .variables import Variables


def main(variables: Variables, started: float) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q"], check=False).returncode
