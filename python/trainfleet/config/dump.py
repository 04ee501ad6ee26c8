"""A config as YAML: with all that was derived, or as it was asked for, to be derived again."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import yaml

from .load import Derivation
from .types import Config, flat

# Keys that came late stand last, wherever they are declared: a resolved config of an older version
# differs in no line but those of newer keys.
LATE = {
    "fleet": ("expires_hours", "idle_minutes", "aws", "image", "base_image", "accelerator"),
    "data": ("bad_records", "instance_type"),
    "model": ("head_size", "module"),
    "train": ("separate_documents", "layout", "loggers", "callback", "compile_only"),
}


def dump_resolved(config: Config) -> str:
    """The whole config, with every derived value in it."""
    values = dataclasses.asdict(config)
    for group, late in LATE.items():
        values[group] |= {name: values[group].pop(name) for name in late}
    return _yaml(values)


def dump_asked(config: Config, derivation: Derivation) -> str:
    """What was asked for: the file with SET and the variables in it.

    With the keys that a verb has changed in the config since, as a shorter run of it has.
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
