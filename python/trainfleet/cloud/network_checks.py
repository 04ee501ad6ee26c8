"""Checks subnets, security groups and the file system's network before a fleet uses them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from typing import Any

from ..config import Config
from . import template_parts
from .api_errors import passing
from .calls import Calls
from .instances import addresses, interfaces
from .quotas import Obstacle, mine
from .resource_types import has_our_tags
from .template_inputs import Inputs
from .template_storage import makes_file_system

LUSTRE = 988  # TCP port of FSx for Lustre
# GiB of file system for which FSx takes about one address of the subnet; metadata takes one more
SERVER = 1200


def subnets(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Checks whether your subnets are in the VPC and the zone, with room for the nodes and a route
    out.
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


def _described(calls: Calls, ids: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    if wanted := list(ids):
        yield from calls.pages(
            "ec2", "DescribeSubnets", "Subnets", Filters=[{"Name": "subnet-id", "Values": wanted}]
        )


def _placed(row: Mapping[str, Any], config: Config, inputs: Inputs) -> Iterator[Obstacle]:
    """Checks a subnet's network and zone, if the stack's zone decides where nodes are."""
    name, network, zone = row["SubnetId"], row.get("VpcId"), row.get("AvailabilityZone")
    if inputs.kind.in_zone and network != config.fleet.aws.vpc:
        what = f"{name} is in {network}, not in fleet.aws.vpc {config.fleet.aws.vpc}"
        yield Obstacle(what, "fleet.aws.vpc")
    if inputs.kind.in_zone and zone != inputs.zone:
        yield Obstacle(f"{name} is in {zone}, not in {inputs.zone}", "set a subnet in that zone")


def _roomy(
    row: Mapping[str, Any], config: Config, calls: Calls, inputs: Inputs
) -> Iterator[Obstacle]:
    """Checks whether a subnet has enough addresses for nodes and file system."""
    each = 1 if inputs.plain == "yes" else addresses(config.fleet.instance_type or "")
    new = len(inputs.slots) - mine(config, calls)
    makes = makes_file_system(config) and not _has_file_system(config, calls)
    servers = 1 + -(-config.fleet.fsx.size_gib // SERVER) if makes else 0
    free = int(row.get("AvailableIpAddressCount", 0))
    if new * each + servers > free:
        more = f" and {servers} for the file system" if servers else ""
        needed = f"{new} nodes with {each} addresses each{more}"
        what = f"{row['SubnetId']} has {free} free addresses: too few for {needed}"
        yield Obstacle(what, "use a larger one")


def _open(
    row: Mapping[str, Any], config: Config, calls: Calls, inputs: Inputs
) -> Iterator[Obstacle]:
    """Checks whether nodes reach the Internet from a subnet: set-up loads drivers and packages."""
    what, routes = "", _routes(calls, row)
    leads = [
        route for route in routes if route.get("DestinationCidrBlock") == template_parts.ANYWHERE
    ]
    if routes and not any(route.get("State") != "blackhole" for route in leads):
        what = "has no route to the Internet, which set-up needs for drivers and packages"
    elif leads and all(map(_is_gateway, leads)) and not _public(config, row, inputs):
        what = "reaches the Internet by a gateway, but nodes have no public address there"
    if what:
        then = (
            "add a route to a NAT gateway, or use another subnet, unless nodes have their own "
            "mirror and endpoints"
        )
        yield Obstacle(f"{row['SubnetId']} {what}", then, blocks=False)


def _is_gateway(route: Mapping[str, Any]) -> bool:
    return str(route.get("GatewayId")).startswith("igw-")


def _routes(calls: Calls, subnet: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the routes of the subnet's table, or else of the VPC's main table."""
    of_vpc = [{"Name": "vpc-id", "Values": [str(subnet.get("VpcId"))]}]
    tables = list(calls.pages("ec2", "DescribeRouteTables", "RouteTables", Filters=of_vpc))
    for key, value in (("SubnetId", subnet.get("SubnetId")), ("Main", True)):
        for row in tables:
            if any(one.get(key) == value for one in row.get("Associations", ())):
                return list(row.get("Routes", ()))
    return []


def _public(config: Config, subnet: Mapping[str, Any], inputs: Inputs) -> bool:
    """Returns whether a node gets a public address. EC2 assigns none to an instance with several
    network interfaces.
    """
    is_alone = inputs.plain == "yes" or len(interfaces(config.fleet.instance_type or "")) == 1
    return bool(subnet.get("MapPublicIpOnLaunch")) and is_alone and inputs.kind.by_ssh


def walls(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Checks whether your security groups let nodes reach each other and your file system."""
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


def _of_file_system(system: str, calls: Calls, subnet: str) -> Iterator[Obstacle]:
    """Checks whether a file system's security groups admit the subnet's addresses.

    No rule can name the nodes' security group, because the group is new.
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


def _lets_in(rule: Mapping[str, Any], cidr: str) -> bool:
    first, last = rule.get("FromPort", 1), rule.get("ToPort", 0)
    is_port = rule.get("IpProtocol") == "-1" or first <= LUSTRE <= last
    ranges = [ip_network(one["CidrIp"]) for one in rule.get("IpRanges", ())]
    return is_port and any(ip_network(cidr).subnet_of(one) for one in ranges)  # type: ignore[arg-type]


def _groups(calls: Calls, ids: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    if wanted := sorted(ids):
        yield from calls.pages("ec2", "DescribeSecurityGroups", "SecurityGroups", GroupIds=wanted)


def _has_file_system(config: Config, calls: Calls) -> bool:
    rows = calls.pages("fsx", "DescribeFileSystems", "FileSystems")
    return any(has_our_tags(row, config.fleet_name) for row in rows)
