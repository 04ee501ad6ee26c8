"""make check: lint, format, types and shell scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .variables import Variables


def main(variables: Variables, started: float) -> int:
    scripts = sorted(map(str, Path("scripts").glob("*.sh")))
    tool = Path(sys.executable).parent
    commands = [
        [sys.executable, "-m", "ruff", "check", "."],
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
        [str(tool / "shellcheck"), *scripts, ".ci/run"],
    ]
    failed = [command for command in commands if subprocess.run(command, check=False).returncode]
    print("checks failed" if failed else f"all {len(commands)} checks passed")
    return 1 if failed else 0
