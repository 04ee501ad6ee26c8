"""What installed packages add to this one, by entry points (packaging.python.org, Entry points specification).

trainfleet.backends  a class of `backends.base.Backend`: where jobs run
trainfleet.seats     a `node.placement.Seating`: how the nodes of such a backend know which of them they are
trainfleet.benches   how tests/conformance tries it: a generator that yields a `Bench`
"""

from __future__ import annotations

from functools import cache

from ..trust.errors import BackendError

OF_BACKENDS, OF_SEATS, OF_BENCHES = "trainfleet.backends", "trainfleet.seats", "trainfleet.benches"


@cache
def names(group: str) -> tuple[str, ...]:
    """The names that installed packages add to a group."""
    from importlib.metadata import entry_points  # reads the metadata of all packages: some 0.02 s

    return tuple(sorted(entry_points(group=group).names))


def offered(group: str, name: str) -> object:
    """What an installed package adds under that name; None where none does.

    Raises:
        BackendError: it can't be loaded.
    """
    from importlib.metadata import entry_points

    for point in entry_points(group=group, name=name):
        try:
            return point.load()
        except Exception as error:  # whatever a package of somebody else's does as it is imported
            why, then = f"{type(error).__name__}: {error}", f"mend or remove the package {point.dist.name if point.dist else ''}"
            raise BackendError("can't be loaded", where=f"{point.value} ({group}: {name})", why=why, next=then) from error
    return None
