"""make ls: what is ours in the region, of every config, with what it costs and since when; found by
tag alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..backends import backend_of
from ..config import Config
from ..launch.command import config_of, settings_of
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, _ = config_of(settings_of(variables))
    for line in holdings(config):
        print(line)
    return 0


def holdings(config: Config) -> Iterator[str]:
    """What is ours in the region, by config, for people; CloudError at the end where not all of it
    may be looked at.
    """
    if not backend_of(config).machines().made:
        yield (
            f"the {config.fleet.backend} backend makes no machines: there is nothing that "
            "costs money by itself"
        )
        return
    from ..cloud.calls import Calls
    from ..cloud.inventory import find, require_seen, table, total, weighed
    from ..cloud.region import region_of

    region = region_of(config)
    calls = Calls(region)
    everything = list(weighed(calls, find(calls)))
    if found := [one for one in everything if one.id]:
        yield from table(found)
        yield f"{len(found)} thing{'s' * (len(found) > 1)} in {region}: {total(found)}"
        yield (
            "next: make clean removes those of its config, with CONFIG=path those of another; "
            "PURGE=1 those that hold data"
        )
    require_seen(everything, region, "make ls")
    if not found:
        yield f"nothing of ours is in {region}"
