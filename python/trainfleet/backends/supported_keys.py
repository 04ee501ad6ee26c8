"""Config keys that each backend supports, from `backends` in the schema. Setting an unsupported key
is an error.

The local backend accepts all keys, so that a config for other machines can also be used locally. A
third-party backend defines its options in fleet.options with a frozen dataclass.
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import yaml

from ..config import Config, Refusals
from ..config.schema import is_group, load_schema, walk
from ..config.yaml_lines import dotted
from ..trust.errors import InputError
from ..trust.untrusted_input import show
from ..trust.validation import fit

LOCAL, CREATED = "local", "parallelcluster"  # CREATED: Slurm on a cluster that setup creates


def kind_of(config: Config) -> str:
    """Returns the config's backend name as the schema spells it."""
    if config.fleet.backend == "slurm" and config.fleet.slurm.create:
        return CREATED
    return config.fleet.backend


@cache
def table() -> dict[str, tuple[tuple[str, ...], Any]]:
    """Returns key → supporting backends and default, for keys that not all backends support.

    A key without a list of backends inherits its group's list.
    """
    rows = dict[str, tuple[tuple[str, ...], Any]]()
    groups = dict[tuple[str, ...], tuple[str, ...]]()
    for key, part in walk(load_schema()):
        backends = tuple(part.get("backends", ())) or groups.get(key[:-1], ())
        if is_group(part):
            groups[key] = backends
        elif backends:
            rows[dotted(key)] = backends, part.get("default")
    return rows


def honours(config: Config, key: str) -> bool:
    """Returns whether the config's backend supports this key."""
    return key not in table() or kind_of(config) in table()[key][0]


def refuse(
    config: Config, uses: frozenset[str] = frozenset(), options: type[object] | None = None
) -> Refusals:
    """Yields (key, message) for each unsupported key that is set.

    `uses` lists keys that a third-party backend supports, and `options` defines its fleet.options.
    """
    if options:
        try:
            options_of(config, options)
        except InputError as error:
            yield "fleet.options", f"{error.key}: {error.what}"
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


T = TypeVar("T")


def options_of(config: Config, kind: type[T]) -> T:
    """Returns the options as an instance of the dataclass `kind`, which defines them.

    Raises:
        InputError: an option is unknown, missing, duplicated, or has a value of the wrong type.
    """
    given: dict[str, object] = {}
    for option in config.fleet.options:
        name, _, text = option.partition("=")
        if name in given:
            raise InputError("is given twice", key=name)
        try:
            given[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError("is not valid YAML", key=name) from error
    return fit(kind, given)
