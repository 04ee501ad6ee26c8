"""make release: builds the wheel and the sdist, and checks them in a clean environment
(scripts/release.py).
"""

from __future__ import annotations

import subprocess
import sys

from .variables import Variables


def main(variables: Variables, started: float) -> int:
    return subprocess.run([sys.executable, "scripts/release.py"], check=False).returncode
