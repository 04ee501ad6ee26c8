"""Locates the program's own files, in a checkout or in an installed package, and objects of other
installed packages. An installed trainfleet bundles the other files of the checkout that it needs.

Packages provide objects through entry points (packaging.python.org, Entry points specification):

trainfleet.backends    subclass of `backends.base.Backend` that runs jobs
trainfleet.placements  `node.placement.PlacementSource` that reads the placement of the backend's
                       nodes
trainfleet.benches     generator of `Bench` objects that tests/conformance uses to test the
                       backend
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from ..trust.errors import BackendError

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
    if has_pip:
        return f"{sys.executable} -m pip install {package}"
    return f"uv pip install --python {sys.executable} {package}"


OF_BACKENDS = "trainfleet.backends"
OF_PLACEMENTS = "trainfleet.placements"


@cache
def names_offered(group: str) -> tuple[str, ...]:
    """Returns the names that installed packages register in an entry point group."""
    # Imported here, because it reads the metadata of all packages, which takes about 0.02 s.
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=group).names))


def offered(group: str, name: str) -> object:
    """Returns the object that an installed package registers under a name, or None if there is no
    such package.

    Raises:
        BackendError: the object can't be loaded.
    """
    from importlib.metadata import entry_points

    for point in entry_points(group=group, name=name):
        try:
            return point.load()
        except Exception as error:  # importing a third-party package may raise any error
            why = f"{type(error).__name__}: {error}"
            raise BackendError(
                "can't be loaded",
                where=f"{point.value} ({group}: {name})",
                why=why,
                next=f"fix or uninstall the package {point.dist.name if point.dist else ''}",
            ) from error
    return None


def sources_of(group: str, name: str) -> tuple[list[Path], dict[str, bytes]]:
    """Returns the packages that register a name, and the metadata that lets a node find them.

    The installer's metadata is not used, because it contains folders of this machine and differs
    between installers.
    """
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    packages, metadata = list[Path](), dict[str, bytes]()
    for point in entry_points(group=group, name=name):
        spec = find_spec(point.module.partition(".")[0])
        if spec and (dist := point.dist):
            packages += map(Path, spec.submodule_search_locations or [str(spec.origin)])
            info = f"python/{dist.name.replace('-', '_')}-{dist.version}.dist-info"
            told = f"Metadata-Version: 2.1\nName: {dist.name}\nVersion: {dist.version}\n"
            metadata[f"{info}/METADATA"] = told.encode()
            metadata[f"{info}/entry_points.txt"] = str(dist.read_text("entry_points.txt")).encode()
    return packages, metadata
