"""Bakes a machine image of one node: asks EC2 for it, sees its snapshot begin, and follows it until
it is available.

CreateImage is asked not to boot the node (NoReboot). A boot would flush its disk, which seal.sh
does too; but it would empty the memory in which the node's keys wait, and nobody could log in to it
any more. So the image's disk is as after a power failure right behind a `sync`, which ext4 and XFS
are made for.

Sources: EC2 user guide, "Create an Amazon EBS-backed AMI" (NoReboot; a snapshot has what was on the
volume when it began), and "Deregister your AMI" (its snapshots stay, and cost); botocore's model of
EC2.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from ..config import Config
from ..trust.errors import CloudError
from . import clock
from .api_errors import passing
from .baking import Baked, baked, versions
from .calls import Calls
from .cloudformation import CREATED
from .prices import MONTH, cost_of
from .resource_types import LOCK
from .template_inputs import own_tags, pairs, slug

# seconds until a snapshot is seen to have begun: less than the node stays sealed
SEEN_IN, AGAIN = (300.0, 5.0)
POLL, PATIENCE = 15.0, 3 * 3600.0  # seconds between two looks at an image, and without any progress
LONGEST = 128  # characters of an image's name
Say = Callable[[str], None]


class Oven:
    """Makes an image of one node."""

    def __init__(self, config: Config, calls: Calls) -> None:
        self.config, self.calls = config, calls

    @property
    def name(self) -> str:
        """The image's name, which an account has once: two commands can't make the same."""
        return (
            f"trainfleet-{slug(self.config.fleet_name)}-{versions(self.config).replace(' ', '-')}"[
                :LONGEST
            ]
        )

    def begun(self) -> Baked | None:
        """The image with these versions that is there, or on its way."""
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
        """Removes what an earlier command has left unfinished, with its snapshots: it may hold what
        an image must not.
        """
        for one in baked(self.config, self.calls):
            if not one.lock or one.state not in ("available", "pending"):
                # one that has not begun yet would come after the image has gone
                self._is_seen(one.id)
                snapshots = [row["SnapshotId"] for row in self.snapshots(one.id)]
                self.calls("ec2", "DeregisterImage", ImageId=one.id)
                for snapshot in snapshots:
                    with passing("InvalidSnapshot.NotFound"):
                        self.calls("ec2", "DeleteSnapshot", SnapshotId=snapshot)
                say(f"removed {one.id}, which an earlier make image left unfinished")

    def begin(self, instance: str) -> str:
        """Asks for an image of the instance's root disk alone; its id."""
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
        """The device names of volumes that somebody has attached to the instance beside its root
        disk.
        """
        (reservation,) = self.calls("ec2", "DescribeInstances", InstanceIds=[instance])[
            "Reservations"
        ]
        (row,) = reservation["Instances"]
        disks = [str(disk["DeviceName"]) for disk in row.get("BlockDeviceMappings", ())]
        return [disk for disk in disks if disk != row.get("RootDeviceName")]

    def await_snapshots(self, image: str) -> None:
        """Returns once the image's snapshot has begun: from then on what the node writes is not in
        it.

        Raises:
            CloudError: none was seen; the image must not be used.
        """
        if not self._is_seen(image):
            what, why = f"the image {image} has no snapshot", f"none was seen in {SEEN_IN:.0f} s"
            raise CloudError(
                what,
                where=f"ec2 in {self.calls.region}",
                why=why,
                next="make image removes it and tries again",
            )

    def _is_seen(self, image: str) -> bool:
        """Tells whether the image has a snapshot by now, or within SEEN_IN."""
        deadline = clock.now() + SEEN_IN
        while not (found := self.snapshots(image)) and clock.now() < deadline:
            clock.sleep(AGAIN)
        return bool(found)

    def snapshots(self, image: str) -> list[Mapping[str, Any]]:
        """The snapshots of an image, which EC2 describes as `Created by CreateImage(i-...) for
        ami-...`.
        """
        about = [{"Name": "description", "Values": [f"*{image}*"]}]
        return list(
            self.calls.pages(
                "ec2", "DescribeSnapshots", "Snapshots", OwnerIds=["self"], Filters=about
            )
        )

    def confirm(self, image: str) -> None:
        """Says by tag which versions the image has: from now on it may be used. The snapshots say
        whose they are.
        """
        ids = [image, *(str(row["SnapshotId"]) for row in self.snapshots(image))]
        self.calls("ec2", "CreateTags", Resources=ids, Tags=pairs({LOCK: versions(self.config)}))

    def follow(self, image: str, say: Say) -> None:
        """Returns once the image is available, and says how far its snapshots are.

        Raises:
            CloudError: EC2 could not make it, or nothing moves any more.
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
            next="make image makes another",
        )

    def cost(self, image: str) -> str:
        """Describes the contents of its snapshots, and their cost."""
        kept = [cost_of("snapshot", row) for row in self.snapshots(image)]
        usd = sum(each or 0.0 for _, each in kept) * MONTH
        return f"{', '.join(what for what, _ in kept)}: ${usd:,.2f} a month by the list price"
