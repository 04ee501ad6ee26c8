"""make setup: the steps that building .venv has not done already. On this machine it prints the
devices to train on.
"""

from __future__ import annotations

from ..launch.command import config_of, settings_of
from ..launch.provisioning import make_ready
from .variables import Variables, flag


def main(variables: Variables, started: float) -> int:
    config, _ = config_of(settings_of(variables))
    return make_ready(config, flag(variables, "YES"))
