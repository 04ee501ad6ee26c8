"""Bakes machine images from a fleet's node. Finds existing images by tag, creates one per set of
locked versions, and selects the one for the next stack.

An image gets the LOCK tag only if its snapshot began while the node was sealed (backends/ec2.py).
Images without the tag are never used.

CreateImage runs with NoReboot. A reboot would flush the disk, but seal.sh already does that. It
would also erase the node's keys, which are in memory, and lock everyone out. The image's disk is
therefore in the state that a power failure right after a `sync` would leave, which ext4 and XFS are
designed to survive.

Sources: EC2 user guide, "Create an Amazon EBS-backed AMI" (NoReboot; a snapshot contains the volume
as of its start), and "Deregister your AMI" (its snapshots stay, and cost money); botocore's EC2
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..config import Config
from ..hosts.install_steps import lock_hash
from ..hosts.platform import load_platform
from ..hosts.tar import content_hash
from ..trust.errors import CloudError
from . import clock
from .calls import Calls, Row, passing
from .cloudformation import CREATED
from .prices import MONTH, cost_of
from .resource_types import LOCK, amis
from .template_inputs import own_tags, pairs, slug


@dataclass(frozen=True)
class Baked:
    """A baked image.

    `lock`: its locked versions, or "" if the image is unfinished; `gib`: root disk size; `made`:
    creation time; `why`: EC2's reason for `state`.
    """

    id: str
    state: str
    lock: str
    gib: int
    made: str
    why: str = ""

    def lack(self, config: Config) -> str:
        """Returns why the config's next machines can't use the image, or "" if they can."""
        wanted, most = versions(config), config.fleet.aws.volume_gib
        if not self.lock:
            return "it is unfinished"
        if self.lock != wanted:
            return f"it has the versions {self.lock}, but the lock now has {wanted}"
        if self.gib > most:
            return f"its disk has {self.gib} GiB, more than fleet.aws.volume_gib {most}"
        return "" if self.state == "available" else f"it is {self.state}"


def versions(config: Config) -> str:
    """Returns the platform's name, and a hash of its locked versions and machine image."""
    platform = load_platform(config.fleet.platform)
    parts = {"lock": lock_hash(platform).encode(), "ami": platform.ami.encode()}
    return f"{platform.name} {content_hash(parts)[:12]}"


def baked(config: Config, calls: Calls) -> list[Baked]:
    """Returns the fleet's baked images, newest first."""
    found = [_baked(id_, tags, row) for id_, tags, row in amis(calls, config.fleet_name)]
    return sorted(found, key=lambda one: one.made, reverse=True)


def _baked(id_: str, tags: Mapping[str, str], row: Row) -> Baked:
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
    """Returns the baked image to use for the fleet's next machines, or None if no image fits or
    fleet.aws.ami is set.
    """
    if config.fleet.aws.ami:
        return None
    return next((one for one in baked(config, calls) if not one.lack(config)), None)


def describe(config: Config, calls: Calls, image: str) -> Iterator[str]:
    """Yields lines for `make plan`: the nodes' image, and why each other baked image is not
    used.
    """
    if config.fleet.aws.ami:
        yield f"image {image}: set by fleet.aws.ami"
    found = baked(config, calls)
    chosen = next((one for one in found if one.id == image), None)
    if chosen:
        baked_on = f"baked from this fleet on {chosen.made[:10]} (make image)"
        yield f"image {chosen.id}: {baked_on}, with the versions {chosen.lock}"
    elif not config.fleet.aws.ami:
        where = "docker/platforms.lock.yaml"
        yield f"image {image}: the image of platform {config.fleet.platform} in {where}"
    for one in found:
        if one != chosen:
            used = "the existing machines use another image, which the stack keeps until make clean"
            why = one.lack(config) or used
            if config.fleet.aws.ami:
                why = "fleet.aws.ami names another"
            yield f"  baked image {one.id} is not used: {why}"


# timeout and poll interval for a snapshot to appear, in seconds; a sealed node unseals after ten
# minutes
SEEN_IN, AGAIN = 300.0, 5.0
POLL, PATIENCE = 15.0, 3 * 3600.0  # poll interval for an image, and timeout without progress
LONGEST = 128  # maximum characters in an image's name
Say = Callable[[str], None]


class Oven:
    """Creates a machine image from one node."""

    def __init__(self, config: Config, calls: Calls) -> None:
        self.config, self.calls = config, calls

    @property
    def name(self) -> str:
        """Returns the image's name. Names are unique per account, so two commands can't create the
        same image.
        """
        made = versions(self.config).replace(" ", "-")
        return f"trainfleet-{slug(self.config.fleet_name)}-{made}"[:LONGEST]

    def begun(self) -> Baked | None:
        """Returns the image with the current versions, finished or in progress, or None."""
        wanted = versions(self.config)
        for one in baked(self.config, self.calls):
            if one.lock == wanted and one.state in ("available", "pending"):
                return one
        return None

    def clear(self, say: Say) -> None:
        """Removes unfinished images and their snapshots, which may contain keys."""
        for one in baked(self.config, self.calls):
            if not one.lock or one.state not in ("available", "pending"):
                # wait for the snapshot: one that starts later would outlive the image
                self._is_seen(one.id)
                snapshots = [row["SnapshotId"] for row in self.snapshots(one.id)]
                self.calls("ec2", "DeregisterImage", ImageId=one.id)
                for snapshot in snapshots:
                    with passing("InvalidSnapshot.NotFound"):
                        self.calls("ec2", "DeleteSnapshot", SnapshotId=snapshot)
                say(f"removed {one.id}, which an earlier make image left unfinished")

    def begin(self, instance: str) -> str:
        """Requests an image of the instance's root disk only, and returns the image's ID."""
        tags = own_tags(self.config.fleet_name) | {CREATED: clock.stamp(), "Name": self.name}
        named = [{"ResourceType": kind, "Tags": pairs(tags)} for kind in ("image", "snapshot")]
        node = f"a node of platform {versions(self.config)} as make setup leaves it"
        about = f"trainfleet {self.config.fleet_name}: {node}"
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
        """Returns the device names of the instance's volumes except its root disk."""
        answer = self.calls("ec2", "DescribeInstances", InstanceIds=[instance])
        row = answer["Reservations"][0]["Instances"][0]
        disks = [str(disk["DeviceName"]) for disk in row.get("BlockDeviceMappings", ())]
        return [disk for disk in disks if disk != row.get("RootDeviceName")]

    def await_snapshots(self, image: str) -> None:
        """Waits until the image's snapshot has started. Later writes on the node are not part of
        it.

        Raises:
            CloudError: EC2 listed no snapshot in time, so the image must not be used.
        """
        if not self._is_seen(image):
            then = "run make image, which removes it and tries again"
            raise self._error(f"{image} has no snapshot", f"none was seen in {SEEN_IN:.0f} s", then)

    def _is_seen(self, image: str) -> bool:
        """Returns whether a snapshot of the image appears within SEEN_IN seconds."""
        deadline = clock.now() + SEEN_IN
        while not (found := self.snapshots(image)) and clock.now() < deadline:
            clock.sleep(AGAIN)
        return bool(found)

    def snapshots(self, image: str) -> list[Row]:
        """Returns an image's snapshots, identified by EC2's description `Created by
        CreateImage(i-...) for ami-...`.
        """
        about = [{"Name": "description", "Values": [f"*{image}*"]}]
        named = {"OwnerIds": ["self"], "Filters": about}
        return list(self.calls.pages("ec2", "DescribeSnapshots", "Snapshots", **named))

    def confirm(self, image: str) -> None:
        """Tags the image and its snapshots with the versions, which allows stacks to use the
        image.
        """
        ids = [image, *(str(row["SnapshotId"]) for row in self.snapshots(image))]
        self.calls("ec2", "CreateTags", Resources=ids, Tags=pairs({LOCK: versions(self.config)}))

    def follow(self, image: str, say: Say) -> None:
        """Waits until the image is available, and reports the progress of its snapshots.

        Raises:
            CloudError: EC2 failed to create the image, or made no progress for PATIENCE seconds.
        """
        failed, then = f"{image} could not be made", "run make image to make another"
        said, moved = "", clock.now()
        while (one := self._look(image)) is None or one.state == "pending":
            now = ", ".join(str(row.get("Progress") or "0%") for row in self.snapshots(image))
            if now != said:
                said, moved = now, clock.now()
                say(f"{image}: snapshot {now}")
            if clock.now() - moved > PATIENCE:
                raise self._error(failed, f"no progress in {PATIENCE / 3600:.0f} h", then)
            clock.sleep(POLL)
        if one.state != "available":
            raise self._error(failed, one.why or one.state, then)

    def _look(self, image: str) -> Baked | None:
        return next((one for one in baked(self.config, self.calls) if one.id == image), None)

    def _error(self, what: str, why: str, then: str) -> CloudError:
        where = f"ec2 in {self.calls.region}"
        return CloudError(f"the image {what}", where=where, why=why, next=then)

    def cost(self, image: str) -> str:
        """Describes the size and cost of the image's snapshots."""
        kept = [cost_of("snapshot", row) for row in self.snapshots(image)]
        usd = sum(each or 0.0 for _, each in kept) * MONTH
        return f"{', '.join(what for what, _ in kept)}: ${usd:,.2f} a month at list price"
