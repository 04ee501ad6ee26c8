"""make doctor: checks whether the fleet is fit to train, and prints each host's problems with a
command; LIFT=host releases one from quarantine.
"""

from __future__ import annotations

from ..launch.command import config_to_examine, settings_of
from ..launch.provisioning import examine
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config = config_to_examine(settings_of(variables))
    return examine(config, variables.get("LIFT", "").replace(",", " ").split())
