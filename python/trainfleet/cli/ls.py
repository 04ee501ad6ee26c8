"""make ls: all trainfleet resources of a region, of every config, with cost and age; found only by
tag.
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
    """Yields lines about the region's resources, by config; CloudError at the end if the
    credentials may not list all of them.
    """
    if not backend_of(config).machines().made:
        yield (
            f"the {config.fleet.backend} backend makes no machines, so it has no resource that "
            "costs money"
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
        yield f"{len(found)} resource{'s' * (len(found) > 1)} in {region}: {total(found)}"
        yield (
            "next: make clean removes those of its config, with CONFIG=path those of another, "
            "with PURGE=1 also those that hold data"
        )
    require_seen(everything, region, "make ls")
    if not found:
        yield f"trainfleet has no resources in {region}"
