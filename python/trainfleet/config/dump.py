"""Writes a config as YAML, either resolved or as the user requested it.

Only the requested form can be derived again.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import yaml

from .load import Derivation
from .types import Config, flat


def dump_resolved(config: Config) -> str:
    """Returns the complete config as YAML, including derived values."""
    return _yaml(dataclasses.asdict(config))


def dump_asked(config: Config, derivation: Derivation) -> str:
    """Returns the requested config as YAML: the file with SET, make variables and the verb's
    changes.

    For example, a verb may shorten the run.
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
    """Converts tuples to lists at every level, because YAML's safe dumper rejects tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
