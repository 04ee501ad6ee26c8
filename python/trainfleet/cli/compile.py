"""make compile: compiles the training's programs on the fleet, into the cache that its nodes
share.
"""

from __future__ import annotations

from ..launch import compiling
from ..launch.command import config_of, settings_of
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, derived = config_of(settings_of(variables))
    compiling.require(config)
    return compiling.compile_ahead(config, derived, started)
