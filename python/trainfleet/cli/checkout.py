"""Verbs for developing trainfleet in a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..process.processes import run_module
from ..trust.errors import ConfigError
from .variables import Variables


def new_backend(variables: Variables, started: float) -> int:
    """Writes a package that adds a backend, including its conformance tests."""
    from ..backends import skeleton

    if "NAME" not in variables:
        raise ConfigError.of(
            "NAME", "must name the backend", next="make new-backend NAME=kubernetes"
        )
    name = variables["NAME"]
    files = skeleton.write(name, Path())
    print("\n".join(["wrote", *(f"  {file}" for file in files)]))
    print(
        f"next: .venv/bin/python -m pip install --no-deps -e {files[0].parent}, then make plan "
        f"SET='fleet.backend={name}'"
    )
    return 0


def test(variables: Variables, started: float) -> int:
    """Runs the fast tests, which take minutes. `make drills` runs the slow tests."""
    # Run four test files in parallel, because tests spend half their time waiting. Limit each
    # process to one thread, because otherwise the processes would compete for cores.
    at_once = ("--numprocesses=4", "--dist=loadfile", "--no-loadscope-reorder", "--durations=15")
    return run_module("pytest", "-q", "-m", "not thorough", *at_once, OMP_NUM_THREADS="1")


def check(variables: Variables, started: float) -> int:
    """Checks lint, format, types, shell scripts, version pins outside the locks, prose and the
    Dockerfile.
    """
    scripts = sorted(map(str, Path("scripts").glob("*.sh")))
    tool = Path(sys.executable).parent
    hadolint = tool / "hadolint"
    commands = [
        [sys.executable, "-m", "ruff", "check", "."],
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
        [str(tool / "shellcheck"), *scripts, ".ci/run"],
        [sys.executable, "scripts/versions.py"],
        [sys.executable, "scripts/prose.py"],
    ]
    if hadolint.exists() or "REQUIRE_ALL" in os.environ:
        commands.append([str(hadolint), "docker/Dockerfile"])
    else:
        print(
            "docker/Dockerfile is not checked, because hadolint is not installed; run "
            "scripts/venv.sh apply requirements-test.lock"
        )
    failed = [command for command in commands if subprocess.run(command, check=False).returncode]
    print("checks failed" if failed else f"all {len(commands)} checks passed")
    return 1 if failed else 0


def release(variables: Variables, started: float) -> int:
    """Builds the wheel and sdist, and tests them in a clean environment."""
    return subprocess.run([sys.executable, "scripts/release.py"], check=False).returncode
