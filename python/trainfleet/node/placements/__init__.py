"""How each engine tells a node of its seat: a module an engine, which launcher and node both
import. Standard library only.

A package of yours adds an engine by an entry point in the group `trainfleet.seats`
(process/plugins.py), which names a `Seating`; its backend has the same one as `seat`.

Covered are environments as the engines document them (sources: tests/unit/test_placement.py).
Not covered are nodes of Slurm, AWS Batch and SageMaker themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from ...process import plugins
from ...trust.errors import BackendError
from ..placement import NEXT, Seating

# our own launcher counts before the engine around it
OURS = ("fleet", "batch", "slurm", "sagemaker")


def seating(name: str) -> Seating:
    """The engine of that name.

    Raises:
        BackendError: there is none, or what a package offers under that name is something else.
    """
    found = (
        import_module(f".{name}", __name__).SEATING
        if name in OURS
        else plugins.offered(plugins.OF_SEATS, name)
    )
    if not isinstance(found, Seating):
        why = (
            f"it is not one of {', '.join(OURS)}, and no installed package adds it "
            f"({plugins.OF_SEATS})"
        )
        raise BackendError(f"{name[:80]!r} is not an engine that starts nodes", why=why, next=NEXT)
    return found


def names() -> Iterator[str]:
    yield from OURS
    yield from plugins.names(plugins.OF_SEATS)


def here() -> Seating:
    """The engine that started this node.

    Raises:
        BackendError: none of them did.
    """
    if found := next(
        (engine for name in names() if (engine := seating(name)).has_started_this()), None
    ):
        return found
    why = f"none of the engines that are known here has told it its place: {', '.join(names())}"
    raise BackendError("this process was not started as a node of a job", why=why, next=NEXT)
