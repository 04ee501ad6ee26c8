"""A config as YAML: with all that was derived, or as it was asked for, to be derived again."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import yaml

from .load import Derivation
from .types import Config, flat


def dump_resolved(config: Config) -> str:
    """The whole config, with every derived value in it."""
    return _yaml(dataclasses.asdict(config))


def dump_asked(config: Config, derivation: Derivation) -> str:
    """Writes the config as it was asked for: the file with SET and the variables in it.

    It includes the keys that a verb has changed since, for example for a shorter run.
    """
    values = copy.deepcopy(derivation.asked)
    before = dict(flat(dataclasses.asdict(derivation.config)))
    for name, value in flat(dataclasses.asdict(config)):
        if value != before.get(name):
            *groups, key = name.split(".")
            target = values
            for group in groups:
                target[group] = target = target.get(group) or {}
            target[key] = value
    return _yaml(values)


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(_plain(values), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down: YAML's safe dumper knows no tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
