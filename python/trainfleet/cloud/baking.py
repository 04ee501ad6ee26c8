"""Machine images that are baked from a fleet's node: found by tag, made once for each lock of
versions, and used by the next stack.

An image gets the tag LOCK only if its snapshot began while the node was sealed (Oven). An image
without the tag is not used.

CreateImage is asked not to boot the node (NoReboot). A boot would flush its disk, which seal.sh
does too; but it would empty the memory that holds the node's keys, and nobody could log in to it
any more. So the image's disk is as after a power failure right after a `sync`, which ext4 and XFS
are built for.

Sources: EC2 user guide, "Create an Amazon EBS-backed AMI" (NoReboot; a snapshot has what was on the
volume when it began), and "Deregister your AMI" (its snapshots stay, and cost); botocore's model of
EC2.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..hosts.install_steps import lock_hash
from ..hosts.platform import load_platform
from ..hosts.tar import content_hash
from ..trust.errors import CloudError
from . import clock
from .api_errors import passing
from .calls import Calls
from .cloudformation import CREATED
from .prices import MONTH, cost_of
from .resource_types import LOCK, amis
from .template_inputs import own_tags, pairs, slug


@dataclass(frozen=True)
class Baked:
    """A baked image: its state, its versions ("" if unfinished), its root disk in GiB, and when and
    how it was made.
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
            return f"it has the versions {self.lock}, but the lock now has {wanted}"
        if self.gib > most:
            return f"its disk has {self.gib} GiB, more than fleet.aws.volume_gib {most}"
        return "" if self.state == "available" else f"it is {self.state}"


def versions(config: Config) -> str:
    """Identifies everything that setup brings to a node: the platform's versions and its image."""
    platform = load_platform(config.fleet.platform)
    return (
        f"{platform.name} "
        f"{content_hash({'lock': lock_hash(platform).encode(), 'ami': platform.ami.encode()})[:12]}"
    )


def baked(config: Config, calls: Calls) -> list[Baked]:
    """Returns all baked images of the fleet, the newest first."""
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
    """Describes for `make plan` the image that nodes are made from, and why baked images are not
    used.
    """
    if config.fleet.aws.ami:
        yield f"image {image}: set by fleet.aws.ami"
    found = baked(config, calls)
    chosen = next((one for one in found if one.id == image), None)
    if chosen:
        yield (
            f"image {chosen.id}: baked from this fleet on {chosen.made[:10]} (make image), with "
            f"the versions {chosen.lock}"
        )
    elif not config.fleet.aws.ami:
        where = "docker/platforms.lock.yaml"
        yield f"image {image}: the image of platform {config.fleet.platform} in {where}"
    for one in found:
        if one != chosen:
            used = "the existing machines use another image, which the stack keeps until make clean"
            why = (
                "fleet.aws.ami names another" if config.fleet.aws.ami else one.lack(config) or used
            )
            yield f"  baked image {one.id} is not used: {why}"


# seconds until a snapshot must have begun: less than the node stays sealed
SEEN_IN, AGAIN = (300.0, 5.0)
POLL, PATIENCE = 15.0, 3 * 3600.0  # seconds between two polls, and without progress
LONGEST = 128  # characters of an image's name
Say = Callable[[str], None]


class Oven:
    """Makes an image from one node."""

    def __init__(self, config: Config, calls: Calls) -> None:
        self.config, self.calls = config, calls

    @property
    def name(self) -> str:
        """Returns the image's name. An account has each name only once, so two commands can't make
        the same image.
        """
        return (
            f"trainfleet-{slug(self.config.fleet_name)}-{versions(self.config).replace(' ', '-')}"[
                :LONGEST
            ]
        )

    def begun(self) -> Baked | None:
        """Returns the existing image with these versions, also one that is still being made."""
        wanted = versions(self.config)
        states = ("available", "pending")
        return next(
            (
                one
                for one in baked(self.config, self.calls)
                if one.lock == wanted and one.state in states
            ),
            None,
        )

    def clear(self, say: Say) -> None:
        """Removes unfinished images of an earlier command, with their snapshots: they may hold what
        an image must not.
        """
        for one in baked(self.config, self.calls):
            if not one.lock or one.state not in ("available", "pending"):
                # a snapshot that has not begun yet would appear after the image is gone
                self._is_seen(one.id)
                snapshots = [row["SnapshotId"] for row in self.snapshots(one.id)]
                self.calls("ec2", "DeregisterImage", ImageId=one.id)
                for snapshot in snapshots:
                    with passing("InvalidSnapshot.NotFound"):
                        self.calls("ec2", "DeleteSnapshot", SnapshotId=snapshot)
                say(f"removed {one.id}, which an earlier make image left unfinished")

    def begin(self, instance: str) -> str:
        """Requests an image of only the instance's root disk; returns its id."""
        moment = datetime.datetime.fromtimestamp(clock.now(), datetime.UTC).isoformat(
            timespec="seconds"
        )
        tags = own_tags(self.config.fleet_name) | {CREATED: moment, "Name": self.name}
        named = [{"ResourceType": kind, "Tags": pairs(tags)} for kind in ("image", "snapshot")]
        about = (
            f"trainfleet {self.config.fleet_name}: a node of platform {versions(self.config)} "
            "as make setup leaves it"
        )
        left_out = [{"DeviceName": disk, "NoDevice": ""} for disk in self._others(instance)]
        answer = self.calls(
            "ec2",
            "CreateImage",
            InstanceId=instance,
            Name=self.name,
            Description=about,
            NoReboot=True,
            TagSpecifications=named,
            **({"BlockDeviceMappings": left_out} if left_out else {}),
        )
        return str(answer["ImageId"])

    def _others(self, instance: str) -> list[str]:
        """Returns the device names of volumes that a user attached to the instance in addition to
        its root disk.
        """
        (reservation,) = self.calls("ec2", "DescribeInstances", InstanceIds=[instance])[
            "Reservations"
        ]
        (row,) = reservation["Instances"]
        disks = [str(disk["DeviceName"]) for disk in row.get("BlockDeviceMappings", ())]
        return [disk for disk in disks if disk != row.get("RootDeviceName")]

    def await_snapshots(self, image: str) -> None:
        """Waits until the image's snapshot has begun: later writes of the node are not in it.

        Raises:
            CloudError: no snapshot was seen; the image must not be used.
        """
        if not self._is_seen(image):
            what, why = f"the image {image} has no snapshot", f"none was seen in {SEEN_IN:.0f} s"
            raise CloudError(
                what,
                where=f"ec2 in {self.calls.region}",
                why=why,
                next="run make image, which removes it and tries again",
            )

    def _is_seen(self, image: str) -> bool:
        """Tells whether the image has a snapshot by now, or within SEEN_IN."""
        deadline = clock.now() + SEEN_IN
        while not (found := self.snapshots(image)) and clock.now() < deadline:
            clock.sleep(AGAIN)
        return bool(found)

    def snapshots(self, image: str) -> list[Mapping[str, Any]]:
        """Returns an image's snapshots, which EC2 describes as `Created by CreateImage(i-...) for
        ami-...`.
        """
        about = [{"Name": "description", "Values": [f"*{image}*"]}]
        return list(
            self.calls.pages(
                "ec2", "DescribeSnapshots", "Snapshots", OwnerIds=["self"], Filters=about
            )
        )

    def confirm(self, image: str) -> None:
        """Tags the image with its versions: from now on it may be used. Tags the snapshots with
        their owner.
        """
        ids = [image, *(str(row["SnapshotId"]) for row in self.snapshots(image))]
        self.calls("ec2", "CreateTags", Resources=ids, Tags=pairs({LOCK: versions(self.config)}))

    def follow(self, image: str, say: Say) -> None:
        """Waits until the image is available, and reports the progress of its snapshots.

        Raises:
            CloudError: EC2 could not make it, or makes no more progress.
        """
        said, moved = "", clock.now()
        while (one := self._look(image)) is None or one.state == "pending":
            now = ", ".join(str(row.get("Progress") or "0%") for row in self.snapshots(image))
            if now != said:
                said, moved = now, clock.now()
                say(f"{image}: snapshot {now}")
            if clock.now() - moved > PATIENCE:
                raise self._trouble(image, f"no progress in {PATIENCE / 3600:.0f} h")
            clock.sleep(POLL)
        if one.state != "available":
            raise self._trouble(image, one.why or one.state)

    def _look(self, image: str) -> Baked | None:
        return next((one for one in baked(self.config, self.calls) if one.id == image), None)

    def _trouble(self, image: str, why: str) -> CloudError:
        where = f"ec2 in {self.calls.region}"
        return CloudError(
            f"the image {image} could not be made",
            where=where,
            why=why,
            next="run make image to make another",
        )

    def cost(self, image: str) -> str:
        """Describes the contents of its snapshots and their cost."""
        kept = [cost_of("snapshot", row) for row in self.snapshots(image)]
        usd = sum(each or 0.0 for _, each in kept) * MONTH
        return f"{', '.join(what for what, _ in kept)}: ${usd:,.2f} a month at list price"
