"""make ls: what is ours in the region, of every config, with what it costs and since when; found by tag alone."""

from __future__ import annotations

from ..launch.account_inventory import holdings
from ..launch.command import config_of, settings_of
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, _ = config_of(settings_of(variables))
    print("\n".join(holdings(config)))
    return 0
