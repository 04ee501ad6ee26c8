"""The pretended account's machine images: made of instances, with a snapshot for each of their EBS volumes, and taken away.

As EC2 documents it: an image's name is its region's only one; with NoReboot the instance stays up; a snapshot has what was on the
volume when it began; the image is pending until its snapshots are whole; they outlive it, and can't go before it (EC2 user guide,
"Create an Amazon EBS-backed AMI" and "Deregister your AMI"; EBS user guide, "Delete an EBS snapshot"; read 2026-11-25). A disk that
is made of a snapshot has its size at least (RunInstances, InvalidBlockDeviceMapping).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from . import compute
from .account import Account, Refused, Thing, answers, moment_of, tag_list, tags_of

BEGINS, WHOLE = (
    20.0,
    240.0,
)  # seconds until the snapshots of an image have begun, and until it is available
ROOT = "/dev/sda1"


@answers("ec2", "CreateImage")
def create_image(account: Account, InstanceId: str, Name: str, NoReboot: bool = False, Description: str = "",
                 BlockDeviceMappings: Iterable[Mapping[str, Any]] = (), TagSpecifications: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:  # fmt: skip
    instance = account.get("instance", InstanceId, "InvalidInstanceID.NotFound")
    if instance.state not in ("running", "stopped"):
        raise Refused(
            "IncorrectState", f"Instance is not in state 'running' or 'stopped': {InstanceId}"
        )
    if any(
        thing.properties["Name"] == Name for thing in account.things.values() if thing.kind == "ami"
    ):
        raise Refused("InvalidAMIName.Duplicate", f"AMI name {Name} is already in use")
    if not NoReboot and instance.state == "running":
        account.on_boot(instance)
    tags = {one["ResourceType"]: tags_of(one["Tags"]) for one in TagSpecifications}
    image = account.add(
        "ami",
        account.new_id("ami-"),
        {"Name": Name, "Description": Description},
        tags.get("image", {}),
    )
    image.state = "pending"
    left_out = {row["DeviceName"] for row in BlockDeviceMappings if "NoDevice" in row}
    volumes = [thing for thing in account.things.values() if thing.kind == "volume" and thing.properties.get("Attachment") == InstanceId
               and thing.more.get("device", ROOT) not in left_out]  # fmt: skip

    def begin() -> None:
        for volume in volumes:
            about = f"Created by CreateImage({InstanceId}) for {image.id}"
            snapshot = account.add("snapshot", account.new_id("snap-"), {"Size": volume.properties["Size"], "Description": about},
                                   tags.get("snapshot", {}), device=volume.more.get("device", ROOT), image=image.id)  # fmt: skip
            snapshot.state = "pending"
        account.on_snapshot(instance)

    account.later(BEGINS, begin)
    account.later(WHOLE, lambda: _ends(account, image))
    return {"ImageId": image.id}


def _ends(account: Account, image: Thing) -> None:
    image.more["why"] = account.faults.get("CreateImage", "")
    image.state = "failed" if image.more["why"] else "available"
    for snapshot in _snapshots(account, image):
        snapshot.state = "completed"


def _snapshots(account: Account, image: Thing) -> list[Thing]:
    return [
        thing
        for thing in account.things.values()
        if thing.kind == "snapshot" and thing.more.get("image") == image.id
    ]


def images_of(
    account: Account, ids: Iterable[str], filters: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The account's own images, as DescribeImages has them."""
    ids = list(ids)
    return [
        _row(account, image)
        for image in account.of("ami")
        if (not ids or image.id in ids) and compute.matches(image, filters)
    ]


def _row(account: Account, image: Thing) -> dict[str, Any]:
    disks = [{"DeviceName": one.more["device"], "Ebs": {"SnapshotId": one.id, "VolumeSize": one.properties["Size"]}}
             for one in _snapshots(account, image)]  # fmt: skip
    row = {"ImageId": image.id, "Name": image.properties["Name"], "State": image.state, "Tags": tag_list(image.tags),
           "CreationDate": moment_of(image.since).isoformat(), "RootDeviceName": ROOT, "BlockDeviceMappings": disks}  # fmt: skip
    return row | (
        {"StateReason": {"Code": "Client.InternalError", "Message": image.more["why"]}}
        if image.state == "failed"
        else {}
    )


@answers("ec2", "DeregisterImage")
def deregister(account: Account, ImageId: str) -> dict[str, Any]:
    image = account.things.get(ImageId)
    if image is None or image.kind != "ami":
        raise Refused(
            "InvalidAMIID.Unavailable", f"The image ID '{ImageId}' is no longer available"
        )
    for snapshot in _snapshots(account, image):
        snapshot.more.pop("image")
    del account.things[ImageId]
    return {}


def require_startable(account: Account, data: Mapping[str, Any]) -> None:
    """Refuses an instance of an image that is not there yet, or with a root disk that is smaller than the image's."""
    image = account.things.get(str(data.get("ImageId")))
    if image is None:
        return  # another's, of which nothing is known here
    if image.state != "available":
        raise Refused(
            "InvalidAMIID.Unavailable", f"The image ID '{image.id}' is not available: {image.state}"
        )
    least = max(one.properties["Size"] for one in _snapshots(account, image))
    for disk in data.get("BlockDeviceMappings", ()):
        if disk.get("DeviceName") == ROOT and disk["Ebs"].get("VolumeSize", least) < least:
            raise Refused("InvalidBlockDeviceMapping", f"Volume of size {disk['Ebs']['VolumeSize']}GB is smaller than snapshot, expect size >= {least}GB")  # fmt: skip
