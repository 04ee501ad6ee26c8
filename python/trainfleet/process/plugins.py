"""Finds the objects that installed packages provide through entry points (packaging.python.org,
Entry points specification).

trainfleet.backends    subclass of `backends.base.Backend` that runs jobs
trainfleet.placements  `node.placement.PlacementSource` that reads the placement of the backend's
                       nodes
trainfleet.benches     generator of `Bench` objects that tests/conformance uses to test the
                       backend
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..trust.errors import BackendError

OF_BACKENDS, OF_PLACEMENTS, OF_BENCHES = (
    "trainfleet.backends",
    "trainfleet.placements",
    "trainfleet.benches",
)


@cache
def names(group: str) -> tuple[str, ...]:
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
            why, then = (
                f"{type(error).__name__}: {error}",
                f"fix or uninstall the package {point.dist.name if point.dist else ''}",
            )
            raise BackendError(
                "can't be loaded", where=f"{point.value} ({group}: {name})", why=why, next=then
            ) from error
    return None


def sources(group: str, name: str) -> tuple[list[Path], dict[str, bytes]]:
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
