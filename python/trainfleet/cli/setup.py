"""make setup: what make has not done already by building .venv. On this machine: says what there is
to train on.
"""

from __future__ import annotations

from ..launch.command import config_of, settings_of
from ..launch.provisioning import make_ready
from .variables import Variables, flag


def main(variables: Variables, started: float) -> int:
    config, _ = config_of(settings_of(variables))
    return make_ready(config, flag(variables, "YES"))
