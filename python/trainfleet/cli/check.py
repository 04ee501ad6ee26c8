"""make check: lint, format, types, shell scripts, the Dockerfile, and versions outside the
locks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .variables import Variables


def main(variables: Variables, started: float) -> int:
    scripts = sorted(map(str, Path("scripts").glob("*.sh")))
    tool = Path(sys.executable).parent
    hadolint = tool / "hadolint"
    commands = [
        [sys.executable, "-m", "ruff", "check", "."],
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
        [str(tool / "shellcheck"), *scripts, ".ci/run"],
        [sys.executable, "scripts/versions.py"],
    ]
    if hadolint.exists() or "REQUIRE_ALL" in os.environ:
        commands.append([str(hadolint), "docker/Dockerfile"])
    else:
        print(
            "docker/Dockerfile is not checked, as hadolint is not installed; run scripts/venv.sh "
            "apply requirements-test.lock"
        )
    failed = [command for command in commands if subprocess.run(command, check=False).returncode]
    print("checks failed" if failed else f"all {len(commands)} checks passed")
    return 1 if failed else 0
