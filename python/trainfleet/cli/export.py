"""make export: the newest checkpoint as a Hugging Face folder, OUT."""

from __future__ import annotations

from ..errors import ConfigError, Problem
from ..launch.whereabouts import export
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if "OUT" not in variables:
        raise ConfigError([Problem(0, "OUT", "", "says which folder to make")], next="make export OUT=my-model")
    return export(variables)
