"""The price of an existing resource in US dollars an hour, and a short description."""

from __future__ import annotations

from .prices import of as listed
from .resource_types import Row

FREE = {
    "endpoint",
    "flow log",
    "network interface",
    "internet gateway",
    "route table",
    "subnet",
    "launch template",
    "placement group",
    "security group",
    "VPC",
    "key pair",
    "instance profile",
    "role",
    "association",
    "stack",
    "job queue",
    "environment",
    "job definition",
    "parameter",
    "repository",
}


def of(kind: str, row: Row) -> tuple[str, float | None]:
    """What it is, and its price; None if unknown."""
    match kind:
        case "instance":
            return _instance(row)
        case "volume":
            size, type_ = float(row.get("Size") or 0), str(row.get("VolumeType", ""))
            return f"{size:,.0f} GiB {type_}", listed("volume", type_, size)
        case "snapshot":
            return _snapshot(row)
        case "AMI":
            return f"{row.get('Name', '')}, {row.get('State', '')}; its snapshot costs", 0.0
        case "NAT gateway":
            return "and its traffic", listed("nat", "", 1)
        case "address":
            return str(row.get("PublicIp", "")), listed("address", "", 1)
        case "file system":
            return _file_system(row)
        case "log group":
            return stored(kind, float(row.get("storedBytes", 0)))
        case "image":
            return _image(row)
        case "training job":
            return _training_job(row)
    return "", 0.0 if kind in FREE else None


def stored(kind: str, size: float) -> tuple[str, float | None]:
    """The same of what is paid by the bytes that are in it: a bucket, an image or a log group."""
    return f"{size / 2**30:,.1f} GiB", listed(kind, "", size / 2**30)


def _image(row: Row) -> tuple[str, float | None]:
    """An image that several configs hold is paid by each in equal parts."""
    others = len(row.get("imageTags", ())) - 1
    what, usd = stored("image", float(row.get("imageSizeInBytes", 0)))
    shared = f", shared with {others} other config{'s' * (others > 1)}" if others else ""
    return what + shared, None if usd is None else usd / (others + 1)


def _snapshot(row: Row) -> tuple[str, float | None]:
    """Paid by the blocks that are in it; the whole disk where EC2 does not say how many."""
    told = float(row.get("FullSnapshotSizeInBytes") or 0) / 2**30
    size = told or float(row.get("VolumeSize") or 0)
    return f"{'' if told else 'at most '}{size:,.1f} GiB snapshot", listed("snapshot", "", size)


def _instance(row: Row) -> tuple[str, float | None]:
    state = row["State"]["Name"]
    words = f"{row['InstanceType']} in {row['Placement']['AvailabilityZone']}, {state}"
    if state in ("stopped", "stopping", "shutting-down"):
        return words, 0.0
    return words, listed("instance", str(row["InstanceType"]), 1)


def _training_job(row: Row) -> tuple[str, float | None]:
    """One that has ended costs nothing, but for the machines of its warm pool."""
    machines, state = row.get("ResourceConfig"), str(row["TrainingJobStatus"])
    if not machines:
        return state, 0.0
    kind, count = str(machines["InstanceType"]), int(machines["InstanceCount"])
    words = f"{count} x {kind}, {state if state in ('InProgress', 'Stopping') else 'warm'}"
    return words, listed("training", kind.removeprefix("ml."), count)


def _file_system(row: Row) -> tuple[str, float | None]:
    lustre, size = row.get("LustreConfiguration", {}), float(row["StorageCapacity"])
    deployment, throughput = (
        str(lustre.get("DeploymentType", "")),
        lustre.get("PerUnitStorageThroughput"),
    )
    kind = f"{deployment}-{throughput}" if throughput else deployment
    return f"{size:,.0f} GiB {deployment}", listed("file system", kind, size)
