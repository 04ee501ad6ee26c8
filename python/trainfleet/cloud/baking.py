"""Machine images that are baked of a fleet's node: found by tag, made once for each lock of
versions, used by the next stack.

An image has the tag LOCK only once its snapshot began while the node was sealed (oven.py); one
without it is of no use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..hosts.install_steps import lock_hash
from ..hosts.platform import load_platform
from ..hosts.tar import content_hash
from .calls import Calls
from .cloudformation import CREATED
from .resource_types import LOCK, amis


@dataclass(frozen=True)
class Baked:
    """An image of ours: its state, the versions in it ("": unfinished), its root disk in GiB, when
    and how it was made.
    """

    id: str
    state: str
    lock: str
    gib: int
    made: str
    why: str = ""

    def lack(self, config: Config) -> str:
        """Tells why the config's next machines can't be made from it; "" if they can."""
        wanted, most = versions(config), config.fleet.aws.volume_gib
        if not self.lock:
            return "it is unfinished"
        if self.lock != wanted:
            return f"it has the versions {self.lock}, the lock now says {wanted}"
        if self.gib > most:
            return f"its disk has {self.gib} GiB, more than fleet.aws.volume_gib {most}"
        return "" if self.state == "available" else f"it is {self.state}"


def versions(config: Config) -> str:
    """Identifies everything that setup brings to a node, and its base: the platform's versions and
    its image.
    """
    platform = load_platform(config.fleet.platform)
    return (
        f"{platform.name} "
        f"{content_hash({'lock': lock_hash(platform).encode(), 'ami': platform.ami.encode()})[:12]}"
    )


def baked(config: Config, calls: Calls) -> list[Baked]:
    """All images of the fleet, the newest first."""
    found = [_baked(id_, tags, row) for id_, tags, row in amis(calls, config.fleet_name)]
    return sorted(found, key=lambda one: one.made, reverse=True)


def _baked(id_: str, tags: Mapping[str, str], row: Mapping[str, Any]) -> Baked:
    disks = {
        str(disk.get("DeviceName")): disk.get("Ebs", {})
        for disk in row.get("BlockDeviceMappings", ())
    }
    size = disks.get(str(row.get("RootDeviceName")), {}).get("VolumeSize", 0)
    why = str((row.get("StateReason") or {}).get("Message", ""))
    return Baked(
        id_, str(row.get("State")), tags.get(LOCK, ""), int(size), tags.get(CREATED, ""), why
    )


def fitting(config: Config, calls: Calls) -> Baked | None:
    """Finds the baked image that the fleet's next machines are made from, unless fleet.aws.ami
    names one.
    """
    if config.fleet.aws.ami:
        return None
    return next((one for one in baked(config, calls) if not one.lack(config)), None)


def describe(config: Config, calls: Calls, image: str) -> Iterator[str]:
    """For `make plan`: which image nodes are made from, and why; and which that were baked are not
    used.
    """
    if config.fleet.aws.ami:
        yield f"image {image}: fleet.aws.ami names it"
    found = baked(config, calls)
    chosen = next((one for one in found if one.id == image), None)
    if chosen:
        yield (
            f"image {chosen.id}: baked of this fleet on {chosen.made[:10]} (make image), with "
            f"the versions {chosen.lock}"
        )
    elif not config.fleet.aws.ami:
        where = "docker/platforms.lock.yaml"
        yield f"image {image}: that of platform {config.fleet.platform} in {where}"
    for one in found:
        if one != chosen:
            used = (
                "the machines that are there are of another one, which the stack keeps until "
                "make clean"
            )
            why = (
                "fleet.aws.ami names another" if config.fleet.aws.ami else one.lack(config) or used
            )
            yield f"  baked image {one.id} is not used: {why}"
