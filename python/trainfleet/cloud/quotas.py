"""Checks whether an account has room for a fleet: its quotas, subnets and security groups, and the
file system's network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_network

from ..config.types import Config, Queue
from ..hardware import node_types
from . import template_parts
from .calls import Calls, Row, passing
from .resource_types import has_our_tags, instances
from .template import (
    BUILDER_TYPE,
    BUILDER_VCPUS,
    QUOTAS,
    Quota,
    addresses,
    builds_first,
    capacity_of,
    interfaces,
    quota_of,
)
from .template_inputs import Inputs
from .template_storage import makes_file_system

OF_ANY_TYPE = (
    "Maximum number of instances per training job",
    "Number of instances across all training jobs",
)
RUNNING = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]


@dataclass(frozen=True)
class Obstacle:
    """An obstacle to creating a fleet (or a note, if `blocks` is False), and the command that fixes
    it.
    """

    what: str
    next: str = ""
    blocks: bool = True

    def __str__(self) -> str:
        return self.what + (f"\n    next: {self.next}" if self.next else "")


Obstacles = Iterator[Obstacle]


def vcpus(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether the nodes fit their instance family's vCPU quota, alongside other instances.
    Reserved nodes do not count. The machine that first builds their Python environment does.
    """
    nodes = len(inputs.slots)
    # only ParallelCluster has queues
    queues = config.fleet.slurm.parallelcluster.queues or (Queue("the only one"),)
    for queue in queues:
        name = queue.instance_type or config.fleet.instance_type or ""
        capacity = queue.capacity or capacity_of(config)
        if capacity not in ("reservation", "block"):
            yield from _of_type(name, capacity, min(nodes, queue.max or nodes), config, calls)
    if not inputs.scheduler and builds_first(config) and not mine(config, calls):
        standard = QUOTAS["on-demand"]["c"]
        yield from _within(standard, "on-demand", BUILDER_TYPE, 1, BUILDER_VCPUS, config, calls)


def _of_type(name: str, capacity: str, nodes: int, config: Config, calls: Calls) -> Obstacles:
    quota = quota_of(name, capacity)
    if quota is None:
        what = f"the spot quota of {name} was not checked: its code is unknown"
        yield Obstacle(what, blocks=False)
        return
    each = node_types.INSTANCE_TYPES[name].vcpus
    yield from _within(quota, capacity, name, nodes, each, config, calls)


def _within(
    quota: Quota, capacity: str, name: str, nodes: int, each: int, config: Config, calls: Calls
) -> Obstacles:
    """Yields an obstacle if instances with `each` vCPUs exceed the quota."""
    allowed = value(calls, "ec2", quota)
    used, wanted = sum(_others(config, calls, quota, capacity)), nodes * each
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


def network(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether the quotas allow a VPC and its addresses, unless they already exist."""
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


def storage(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether the file system fits FSx's storage quotas. AWS does not publish the quota
    codes, so they are found by name.
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
            float(other.get("StorageCapacity", 0))
            for other in there
            if str(other.get("LustreConfiguration", {}).get("DeploymentType", ""))
            .lower()
            .startswith(fsx.type)
        )
        allowed, wanted = float(row.get("Value", 0)), used + fsx.size_gib
        if wanted > allowed:
            quota = f"your quota {row.get('QuotaName')!r} is {allowed:,.0f}, {used:,.0f} is in use"
            yield Obstacle(
                f"fleet.fsx.size_gib {fsx.size_gib:,}: {quota}",
                request_more(calls.region, "fsx", str(row.get("QuotaCode")), wanted),
            )


def training(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether the nodes fit SageMaker's quotas. AWS does not publish the quota codes, so
    they are found by name. Nodes in a training plan do not count.
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


def value(calls: Calls, service: str, quota: Quota) -> float | None:
    """Returns the account's quota, or else AWS's default, or None if unknown."""
    for operation in ("GetServiceQuota", "GetAWSDefaultServiceQuota"):
        with passing("NoSuchResourceException"):
            answer = calls("service-quotas", operation, ServiceCode=service, QuotaCode=quota.code)
            return float(answer.get("Quota", {}).get("Value", 0.0))
    return None


def request_more(region: str, service: str, code: str, wanted: float) -> str:
    """Returns the command that requests a quota increase."""
    what = f"--service-code {service} --quota-code {code} --desired-value {wanted:.0f}"
    return f"aws service-quotas request-service-quota-increase {what} --region {region}"


LUSTRE = 988  # TCP port of FSx for Lustre
# FSx uses about one subnet address per this many GiB, and one more for metadata
SERVER = 1200


def subnets(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether your subnets are in the VPC and the zone, with room for the nodes and a route
    to the Internet.
    """
    own = (*config.fleet.sagemaker.subnets, *filter(None, [inputs.subnet]))
    rows = {str(row["SubnetId"]): row for row in _described(calls, own)}
    for name in own:
        if name not in rows:
            what = f"the subnet {name} does not exist in {calls.region}"
            yield Obstacle(what, "set another subnet, or another fleet.aws.region")
            continue
        yield from _placed(rows[name], config, inputs)
        yield from _roomy(rows[name], config, calls, inputs)
        yield from _open(rows[name], config, calls, inputs)


def _described(calls: Calls, ids: Iterable[str]) -> Iterator[Row]:
    if wanted := list(ids):
        yield from calls.pages(
            "ec2", "DescribeSubnets", "Subnets", Filters=[{"Name": "subnet-id", "Values": wanted}]
        )


def _placed(row: Row, config: Config, inputs: Inputs) -> Obstacles:
    """Checks a subnet's VPC and zone, if the nodes must be in the stack's zone."""
    name, network, zone = row["SubnetId"], row.get("VpcId"), row.get("AvailabilityZone")
    if inputs.kind.in_zone and network != config.fleet.aws.vpc:
        what = f"{name} is in {network}, not in fleet.aws.vpc {config.fleet.aws.vpc}"
        yield Obstacle(what, "fleet.aws.vpc")
    if inputs.kind.in_zone and zone != inputs.zone:
        yield Obstacle(f"{name} is in {zone}, not in {inputs.zone}", "set a subnet in that zone")


def _roomy(row: Row, config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether a subnet has enough free addresses for the nodes and the file system."""
    each = 1 if inputs.plain == "yes" else addresses(config.fleet.instance_type or "")
    new = len(inputs.slots) - mine(config, calls)
    makes = makes_file_system(config) and not any(
        has_our_tags(one, config.fleet_name)
        for one in calls.pages("fsx", "DescribeFileSystems", "FileSystems")
    )
    servers = 1 + -(-config.fleet.fsx.size_gib // SERVER) if makes else 0
    free = int(row.get("AvailableIpAddressCount", 0))
    if new * each + servers > free:
        more = f" and {servers} for the file system" if servers else ""
        needed = f"{new} nodes with {each} addresses each{more}"
        what = f"{row['SubnetId']} has {free} free addresses: too few for {needed}"
        yield Obstacle(what, "use a larger subnet")


def _open(row: Row, config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether nodes can reach the Internet from a subnet, to download drivers and
    packages.
    """
    what, routes = "", _routes(calls, row)
    leads = [
        route for route in routes if route.get("DestinationCidrBlock") == template_parts.ANYWHERE
    ]
    if routes and not any(route.get("State") != "blackhole" for route in leads):
        what = "has no route to the Internet, which set-up needs for drivers and packages"
    elif (
        leads
        and all(str(route.get("GatewayId")).startswith("igw-") for route in leads)
        and not _public(config, row, inputs)
    ):
        what = "reaches the Internet through a gateway, but its nodes have no public address"
    if what:
        then = (
            "add a route to a NAT gateway, or use another subnet, unless nodes have their own "
            "mirror and endpoints"
        )
        yield Obstacle(f"{row['SubnetId']} {what}", then, blocks=False)


def _routes(calls: Calls, subnet: Row) -> list[Row]:
    """Returns the routes in the subnet's route table, or else in the VPC's main table."""
    of_vpc = [{"Name": "vpc-id", "Values": [str(subnet.get("VpcId"))]}]
    tables = list(calls.pages("ec2", "DescribeRouteTables", "RouteTables", Filters=of_vpc))
    for key, value in (("SubnetId", subnet.get("SubnetId")), ("Main", True)):
        for row in tables:
            if any(one.get(key) == value for one in row.get("Associations", ())):
                return list(row.get("Routes", ()))
    return []


def _public(config: Config, subnet: Row, inputs: Inputs) -> bool:
    """Returns whether a node gets a public address. EC2 assigns no public address to an instance
    with several network interfaces.
    """
    is_alone = inputs.plain == "yes" or len(interfaces(config.fleet.instance_type or "")) == 1
    return bool(subnet.get("MapPublicIpOnLaunch")) and is_alone and inputs.kind.by_ssh


def walls(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether your security groups allow traffic between nodes, and to your file system."""
    groups = set(config.fleet.sagemaker.security_groups)
    for row in _groups(calls, groups):
        for way, key in (("in from", "IpPermissions"), ("out to", "IpPermissionsEgress")):
            rules = [rule for rule in row.get(key, ()) if rule.get("IpProtocol") == "-1"]
            pairs = [pair for rule in rules for pair in rule.get("UserIdGroupPairs", ())]
            if not any(pair.get("GroupId") in groups for pair in pairs):
                why = f"does not let all traffic {way} itself, which EFA and the ranks need"
                then = "add a rule for all traffic from and to the group itself"
                yield Obstacle(f"{row['GroupId']} {why}", then, blocks=False)
    system = (config.fleet.fsx.dns_name or "").partition(".")[0]
    if inputs.subnet and re.fullmatch("fs-[0-9a-f]{8,}", system):
        with passing("FileSystemNotFound"):  # the file system may belong to another account
            yield from _of_file_system(system, calls, inputs.subnet)


def _of_file_system(system: str, calls: Calls, subnet: str) -> Obstacles:
    """Checks whether a file system's security groups admit the subnet's addresses.

    The rules can't name the nodes' security group, because it is new.
    """
    (row,) = calls("fsx", "DescribeFileSystems", FileSystemIds=[system])["FileSystems"]
    card = row["NetworkInterfaceIds"][:1]
    cards = calls.pages(
        "ec2", "DescribeNetworkInterfaces", "NetworkInterfaces", NetworkInterfaceIds=card
    )
    groups = {one["GroupId"] for card in cards for one in card.get("Groups", ())}
    cidr = next(iter(_described(calls, [subnet])), {"CidrBlock": template_parts.ANYWHERE})[
        "CidrBlock"
    ]
    rules = [rule for group in _groups(calls, groups) for rule in group.get("IpPermissions", ())]
    if not any(_lets_in(rule, cidr) for rule in rules):
        why = f"lets in nodes of {subnet}, {cidr}; Lustre needs TCP 988 and 1018-1023"
        where = f"--group-id {min(groups)} --protocol tcp --port 988-1023 --cidr {cidr}"
        yield Obstacle(
            f"no security group of {system} {why}",
            f"aws ec2 authorize-security-group-ingress {where} --region {calls.region}",
            blocks=False,
        )


def _lets_in(rule: Row, cidr: str) -> bool:
    first, last = rule.get("FromPort", 1), rule.get("ToPort", 0)
    is_port = rule.get("IpProtocol") == "-1" or first <= LUSTRE <= last
    ranges = [ip_network(one["CidrIp"]) for one in rule.get("IpRanges", ())]
    return is_port and any(ip_network(cidr).subnet_of(one) for one in ranges)  # type: ignore[arg-type]


def _groups(calls: Calls, ids: Iterable[str]) -> Iterator[Row]:
    if wanted := sorted(ids):
        yield from calls.pages("ec2", "DescribeSecurityGroups", "SecurityGroups", GroupIds=wanted)
