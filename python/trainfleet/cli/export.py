"""make export: the newest checkpoint as a Hugging Face folder, OUT."""

from __future__ import annotations

from ..errors import ConfigError, Problem
from ..launch.settings import run_started
from ..processes import run_module
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if "OUT" not in variables:
        raise ConfigError([Problem(0, "OUT", "", "says which folder to make")], next="make export OUT=my-model")
    return run_module("trainfleet.engine.export", str(run_started(variables).folder), variables["OUT"])
