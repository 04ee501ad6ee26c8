"""Modules that read a node's placement, one per scheduler. Both the launcher and the nodes import
them, so they use only the standard library.

Another package can add a scheduler through an entry point in the group `trainfleet.placements`
(process/install_paths.py) that names a `PlacementSource`. The package's backend sets `placement` to
the same object.

The modules follow each scheduler's documentation of its environment (sources:
tests/unit/test_placement.py). They have not been tested on real Slurm, AWS Batch or SageMaker
nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from ...process import install_paths
from ...trust.errors import BackendError
from ..placement import NEXT, PlacementSource

# `fleet` is trainfleet's own launcher. It takes precedence over a scheduler that started the
# launcher.
OURS = ("fleet", "batch", "slurm", "sagemaker")


def source(name: str) -> PlacementSource:
    """Returns the placement source of the scheduler with this name.

    Raises:
        BackendError: the scheduler is unknown, or a package's object with this name is not a
            PlacementSource.
    """
    found = (
        import_module(f".{name}", __name__).PLACEMENT
        if name in OURS
        else install_paths.offered(install_paths.OF_PLACEMENTS, name)
    )
    if not isinstance(found, PlacementSource):
        why = (
            f"it is not one of {', '.join(OURS)}, and no installed package adds it "
            f"({install_paths.OF_PLACEMENTS})"
        )
        raise BackendError(f"{name[:80]!r} is not a known scheduler", why=why, next=NEXT)
    return found


def names() -> Iterator[str]:
    yield from OURS
    yield from install_paths.names_offered(install_paths.OF_PLACEMENTS)


def here() -> PlacementSource:
    """Returns the placement source of the scheduler that started this node.

    Raises:
        BackendError: no known scheduler started this process.
    """
    if found := next(
        (engine for name in names() if (engine := source(name)).has_started_this()), None
    ):
        return found
    why = f"the environment has no variables of a known scheduler ({', '.join(names())})"
    raise BackendError("this process was not started as a node of a job", why=why, next=NEXT)
