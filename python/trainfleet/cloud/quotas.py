"""Checks an account's quotas, and suggests the command that requests an increase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..config.types_backends import Queue
from ..hardware import node_types
from .api_errors import passing
from .calls import Calls
from .instances import QUOTAS, Quota, capacity_of, quota_of
from .resource_types import has_our_tags, instances
from .template_inputs import Inputs
from .template_storage import makes_file_system

OF_ANY_TYPE = (
    "Maximum number of instances per training job",
    "Number of instances across all training jobs",
)
RUNNING = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]


@dataclass(frozen=True)
class Obstacle:
    """An obstacle to making a fleet (`blocks`), or a note; and the command that helps."""

    what: str
    next: str = ""
    blocks: bool = True

    def __str__(self) -> str:
        return self.what + (f"\n    next: {self.next}" if self.next else "")


def vcpus(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Checks whether the nodes fit the quota of their family, next to other instances. Nodes in a
    reservation are not counted again.
    """
    nodes = len(inputs.slots)
    # Only a cluster has queues.
    queues = config.fleet.slurm.parallelcluster.queues or (Queue("the only one"),)
    for queue in queues:
        name = queue.instance_type or config.fleet.instance_type or ""
        capacity = queue.capacity or capacity_of(config)
        if capacity not in ("reservation", "block"):
            yield from _of_type(name, capacity, min(nodes, queue.max or nodes), config, calls)


def _of_type(
    name: str, capacity: str, nodes: int, config: Config, calls: Calls
) -> Iterator[Obstacle]:
    quota = quota_of(name, capacity)
    if quota is None:
        what = f"the spot quota of {name} was not checked: its code is unknown"
        yield Obstacle(what, blocks=False)
        return
    allowed = value(calls, "ec2", quota)
    used = sum(_others(config, calls, quota, capacity))
    wanted = nodes * node_types.INSTANCE_TYPES[name].vcpus
    if allowed is not None and used + wanted > allowed:
        beside = f", and other instances use {used:,.0f}" if used else ""
        need = f"{nodes} x {name} need {wanted:,} vCPUs"
        what = f"{need}, but your quota {quota.name!r} is {allowed:,.0f}{beside}"
        yield Obstacle(what, request_more(calls.region, "ec2", quota.code, used + wanted))


def _others(config: Config, calls: Calls, quota: Quota, capacity: str) -> Iterator[float]:
    """Yields the vCPUs of other running instances that count against the quota."""
    for reservation in calls.pages("ec2", "DescribeInstances", "Reservations", Filters=RUNNING):
        for row in reservation.get("Instances", ()):
            kind, is_spot = str(row.get("InstanceType")), row.get("InstanceLifecycle") == "spot"
            listed = node_types.INSTANCE_TYPES.get(kind)
            if listed is None or is_spot != (capacity == "spot"):
                continue
            if quota_of(kind, capacity) == quota and not has_our_tags(row, config.fleet_name):
                cpu = row.get("CpuOptions", {})
                yield float(cpu.get("CoreCount", 0) * cpu.get("ThreadsPerCore", 0)) or listed.vcpus


def mine(config: Config, calls: Calls) -> int:
    """Returns the number of this fleet's nodes that are starting or running."""
    return sum(
        row["InstanceType"] == config.fleet.instance_type
        and row["State"]["Name"] in ("pending", "running")
        for row in instances(calls, config.fleet_name)
    )


def network(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Checks whether the quotas allow a VPC and its addresses, unless they exist already."""
    if config.fleet.aws.vpc or config.fleet.aws.subnets:
        return
    vpcs = list(calls.pages("ec2", "DescribeVpcs", "Vpcs"))
    if any(has_our_tags(row, config.fleet_name) for row in vpcs):
        return
    addresses = len(calls("ec2", "DescribeAddresses").get("Addresses", ()))
    for quota, service, used, wanted in (
        (QUOTAS["network"]["vpcs"], "vpc", len(vpcs), 1),
        (
            QUOTAS["network"]["addresses"],
            "ec2",
            addresses,
            2 if config.fleet.aws.bastion_type else 1,
        ),
    ):
        allowed = value(calls, service, quota)
        if allowed is not None and used + wanted > allowed:
            what = f"the fleet needs {wanted} more {quota.name!r}; you use {used} of {allowed:,.0f}"
            more = request_more(calls.region, service, quota.code, used + wanted)
            yield Obstacle(what, f"set fleet.aws.vpc to an existing one, or run {more}")


def storage(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Checks whether the file system fits FSx's storage quotas. AWS does not publish their codes,
    so this finds them by name.
    """
    if not makes_file_system(config):
        return
    fsx, there = config.fleet.fsx, list(calls.pages("fsx", "DescribeFileSystems", "FileSystems"))
    if any(has_our_tags(row, config.fleet_name) for row in there):
        return
    for row in calls.pages("service-quotas", "ListServiceQuotas", "Quotas", ServiceCode="fsx"):
        words = str(row.get("QuotaName", "")).lower()
        if "hdd" in words or not all(word in words for word in ("lustre", "storage", fsx.type)):
            continue
        used = sum(
            float(other.get("StorageCapacity", 0)) for other in there if _kind(other) == fsx.type
        )
        allowed, wanted = float(row.get("Value", 0)), used + fsx.size_gib
        if wanted > allowed:
            quota = f"your quota {row.get('QuotaName')!r} is {allowed:,.0f}, {used:,.0f} is in use"
            yield Obstacle(
                f"fleet.fsx.size_gib {fsx.size_gib:,}: {quota}",
                request_more(calls.region, "fsx", str(row.get("QuotaCode")), wanted),
            )


def training(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Checks whether the nodes fit SageMaker's quotas. AWS does not publish their codes, so this
    finds them by name. Nodes of a training plan do not count.
    """
    own, spot = config.fleet.sagemaker, "spot " * config.fleet.spot
    if own.training_plan or own.plan_hours is not None:
        return
    kind, nodes = f"ml.{config.fleet.instance_type}", config.fleet.nodes
    names = {f"{kind} for {spot}training job usage", *OF_ANY_TYPE}
    if own.warm_pool_minutes:
        names.add(f"{kind} for training warm pool usage")
    for row in calls.pages(
        "service-quotas", "ListServiceQuotas", "Quotas", ServiceCode="sagemaker"
    ):
        if row["QuotaName"] in names and row["Value"] < nodes:
            what = f"the job needs {nodes} x {kind}, but your quota {row['QuotaName']!r} is"
            more = request_more(calls.region, "sagemaker", row["QuotaCode"], nodes)
            yield Obstacle(f"{what} {row['Value']:g}", more)


def _kind(row: dict[str, Any]) -> str:
    deployment = str(row.get("LustreConfiguration", {}).get("DeploymentType", ""))
    return deployment.partition("_")[0].lower()


def value(calls: Calls, service: str, quota: Quota) -> float | None:
    """Returns the account's quota, or else AWS's default; None if unknown."""
    for operation in ("GetServiceQuota", "GetAWSDefaultServiceQuota"):
        with passing("NoSuchResourceException"):
            answer = calls("service-quotas", operation, ServiceCode=service, QuotaCode=quota.code)
            return float(answer.get("Quota", {}).get("Value", 0.0))
    return None


def request_more(region: str, service: str, code: str, wanted: float) -> str:
    """Returns the command that requests a quota increase."""
    what = f"--service-code {service} --quota-code {code} --desired-value {wanted:.0f}"
    return f"aws service-quotas request-service-quota-increase {what} --region {region}"
