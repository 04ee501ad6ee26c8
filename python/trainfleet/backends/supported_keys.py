"""Keys that each backend uses, from `backends` in the schema. A key without effect is refused,
never ignored.

The local backend refuses no key, because a config may describe other machines while it trains here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from typing import Any

from ..config import Config
from ..config.schema import is_group, load_schema, walk
from ..config.yaml_lines import dotted
from ..trust.untrusted_input import show

LOCAL, CREATED = "local", "parallelcluster"  # CREATED: Slurm on a cluster that setup creates


def kind_of(config: Config) -> str:
    """Returns the schema's name for a config's backend."""
    return (
        CREATED
        if config.fleet.backend == "slurm" and config.fleet.slurm.create
        else config.fleet.backend
    )


@cache
def table() -> dict[str, tuple[tuple[str, ...], Any]]:
    """Returns key → backends and default, for each key that only some backends use. A key without a
    list inherits its group's list.
    """
    rows, groups = (
        dict[str, tuple[tuple[str, ...], Any]](),
        dict[tuple[str, ...], tuple[str, ...]](),
    )
    for key, part in walk(load_schema()):
        backends = tuple(part.get("backends", ())) or groups.get(key[:-1], ())
        if is_group(part):
            groups[key] = backends
        elif backends:
            rows[dotted(key)] = backends, part.get("default")
    return rows


def honours(config: Config, key: str) -> bool:
    """Tells whether the config's backend uses this key."""
    return key not in table() or kind_of(config) in table()[key][0]


def refuse(config: Config, uses: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yields (key, message) for each key without effect. `uses` lists the keys that another
    package's backend uses.
    """
    kind = kind_of(config)
    for key, (backends, default) in {} if kind == LOCAL else table().items():
        value = attrgetter(key)(config)
        if (
            kind not in backends
            and key not in uses
            and value != (tuple(default) if isinstance(default, list) else default)
        ):
            shown = show(list(value) if isinstance(value, tuple) else value)
            yield (
                key,
                f"{shown}: the {config.fleet.backend} backend does not use it; remove it (used "
                f"by {', '.join(backends)})",
            )
