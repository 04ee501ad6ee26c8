"""Locates the program's own files, in a checkout or in an installed package. An installed package
bundles the other files of the checkout that the program needs.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
CODE = PACKAGE.parent  # folder for PYTHONPATH
# The program, and the platform package that ships with it (config/platforms.py)
PACKAGES = (PACKAGE, CODE / "trainfleet_nxd")
_BUNDLED = PACKAGE / "checkout"  # created when the wheel is built (pyproject.toml)
IS_INSTALLED = _BUNDLED.is_dir()
ROOT = _BUNDLED if IS_INSTALLED else PACKAGE.parents[1]


def python_path(code: str | Path = CODE) -> dict[str, str]:
    """Returns the environment variables that make Python find this program in `code` and never
    import from the current folder.

    Without PYTHONSAFEPATH (Python 3.11), a user's random.py or yaml.py in the current folder would
    shadow the package of that name.
    """
    return {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}


def page(name: str) -> str:
    """Returns the path of a documentation page such as schema/README.md, in the current folder if
    it exists there, otherwise next to the program.
    """
    return name if Path(name).exists() else str(ROOT / name)


def version() -> str:
    """Returns the release and, in a checkout, the commit, as in `0.2.0 (1a2b3c4, changed)`."""
    if IS_INSTALLED:
        from importlib import metadata  # imported here, because the import takes 14 ms

        return metadata.version("trainfleet")
    try:
        lines = (ROOT / "pyproject.toml").read_text().splitlines()
    except FileNotFoundError:  # hosts receive only the package
        return "unknown release"
    release = next(line.split('"')[1] for line in lines if line.startswith("version"))
    if not (ROOT / ".git").exists():  # a repository in a parent folder belongs to another project
        return release
    # `git describe --dirty` would lock the index, and leave the lock behind if it is killed.
    words = [
        "git",
        "--no-optional-locks",
        "-C",
        str(ROOT),
        "status",
        "--branch",
        "--porcelain=v2",
        "--untracked-files=no",
    ]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return release
    commit, *rest = answer.stdout.removeprefix("# branch.oid ").splitlines() or [""]
    changed = "" if all(line.startswith("#") for line in rest) else ", changed"
    return f"{release} ({commit[:8]}{changed})" if answer.returncode == 0 else release


def installing(extra: str) -> str:
    """Returns the command that installs an extra from pyproject.toml in this Python environment."""
    # pip reads the extra's packages from the installed metadata, without looking for a newer
    # trainfleet.
    if IS_INSTALLED:
        return installing_package(f"'trainfleet[{extra}]'")
    return "scripts/venv.sh apply requirements-extras.lock"


def installing_package(package: str) -> str:
    """Returns the command that installs a package in this Python environment. Uses uv if the
    environment has no pip, as in environments created by uv.
    """
    # find_spec can't be used here: setuptools would mistake a search for pip for pip itself, and
    # torch.compile, which imports setuptools, would fail.
    has_pip = Path(sysconfig.get_path("purelib"), "pip").is_dir()
    return (
        f"{sys.executable} -m pip install {package}"
        if has_pip
        else f"uv pip install --python {sys.executable} {package}"
    )
