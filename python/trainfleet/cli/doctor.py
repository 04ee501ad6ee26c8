"""make doctor: is the fleet fit to train? What is wrong, by host, and what to type; LIFT=host lets
one out of quarantine.
"""

from __future__ import annotations

from ..launch.command import config_to_examine, settings_of
from ..launch.provisioning import examine
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config = config_to_examine(settings_of(variables))
    return examine(config, variables.get("LIFT", "").replace(",", " ").split())
