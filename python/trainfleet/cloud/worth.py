"""What a thing that was found costs while it is there: US dollars an hour, and what it is in a word or two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import hardware

Row = Mapping[str, Any]
HOURS = 730.0  # in a month, as AWS reckons
FREE = {
    "endpoint", "flow log", "network interface", "internet gateway", "route table", "subnet", "launch template",
    "placement group", "security group", "VPC", "key pair", "instance profile", "role", "association", "stack",
    "job queue", "environment", "job definition", "parameter", "training job",
}  # fmt: skip


def of(kind: str, row: Row, region: str) -> tuple[str, float | None]:
    """What it is, and its price; None where nobody knows it."""
    match kind:
        case "instance":
            return _instance(row)
        case "volume" | "snapshot":
            size, type = float(row.get("Size") or row.get("VolumeSize") or 0), str(row.get("VolumeType", "snapshot"))
            rate = {"gp3": 0.08, "gp2": 0.10, "snapshot": 0.05}.get(type)
            return f"{size:,.0f} GiB {type}", None if rate is None else size * rate / HOURS
        case "NAT gateway":
            return "and its traffic", 0.045
        case "address":
            return str(row.get("PublicIp", "")), 0.005
        case "file system":
            return _file_system(row)
    return "", 0.0 if kind in FREE else None


def _instance(row: Row) -> tuple[str, float | None]:
    state, known = row["State"]["Name"], hardware.instance(row["InstanceType"])
    words = f"{row['InstanceType']} in {row['Placement']['AvailabilityZone']}, {state}"
    if state in ("stopped", "stopping", "shutting-down"):
        return words, 0.0
    return words, known.usd_per_hour if known else None


def _file_system(row: Row) -> tuple[str, float | None]:
    lustre, size = row.get("LustreConfiguration", {}), float(row["StorageCapacity"])
    deployment, throughput = str(lustre.get("DeploymentType", "")), lustre.get("PerUnitStorageThroughput")
    rate = 0.140 if deployment.startswith("SCRATCH") else {125: 0.145, 250: 0.21, 500: 0.34, 1000: 0.60}.get(throughput or 0)
    return f"{size:,.0f} GiB {deployment}", None if rate is None else size * rate / HOURS
