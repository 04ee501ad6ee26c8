"""Checks of an account before anything is made: permissions, quotas, the reservation, subnets, buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..config import Config
from ..storage import s3
from ..trust.errors import CloudError
from . import permissions, quotas
from .calls import Calls
from .discovery import reservation_of
from .instance_networking import addresses
from .instances import capacity_of
from .quotas import Obstacle
from .resource_types import instances, is_ours, tags_of
from .template_inputs import Inputs
from .template_storage import makes_file_system

SERVER = 1200  # GiB: FSx takes about one address of the subnet for each so much of a file system, and one for its metadata
Check = Callable[[Config, Calls, Inputs], Iterator[Obstacle]]


def require(config: Config, calls: Calls, inputs: Inputs) -> None:
    """CloudError with all that keeps the fleet from being made."""
    found = [finding for finding in findings(config, calls, inputs) if finding.blocks]
    if found:
        listed = "\n".join(f"  - {finding}" for finding in found)
        raise CloudError(f"the fleet can't be made as it is\n{listed}", where=calls.region, code="Preflight")


def findings(config: Config, calls: Calls, inputs: Inputs) -> list[Obstacle]:
    """All findings. What can't be checked is reported, and blocks nothing."""
    chosen = CHECKS if inputs.engine in permissions.ON_EC2 else (allowed, buckets)
    return [finding for check in chosen for finding in _tried(check, config, calls, inputs)]


def _tried(check: Check, config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    try:
        yield from check(config, calls, inputs)
    except CloudError as error:
        if error.code in ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "UnauthorizedException"):
            yield Obstacle(f"not looked at, as {error.what}: {(check.__doc__ or '').partition(':')[0].rstrip('.')}", blocks=False)
        else:
            raise


def allowed(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """What the caller may do."""
    try:
        missing = permissions.denied(config, calls, inputs)
    except CloudError as error:
        if not permissions.unsure(error):
            raise
        yield Obstacle(f"what your credentials may do is not looked at: {error.what}", blocks=False)
        return
    if missing:
        then = "have them allowed, or use other credentials (AWS_PROFILE)"
        yield Obstacle(f"your credentials may not do {', '.join(missing)}", then)


def reservation(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether the reservation has room for the nodes now, of their type and in their zone."""
    if capacity_of(config) == "block" and not config.fleet.aws.reservation:
        yield Obstacle("no capacity block is held for the nodes", "make setup shows what is offered, and buys it with YES=1")
    elif row := reservation_of(config, calls):
        yield from _against(row, config, calls, inputs)
    elif row is not None:
        what = f"there is no {config.fleet.aws.reservation} in {calls.region}"
        yield Obstacle(what, "fleet.aws.reservation, or fleet.aws.region")


def _against(row: Mapping[str, Any], config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """All that a reservation has against this fleet."""
    name, wanted, aws = config.fleet.aws.reservation, config.fleet.instance_type, config.fleet.aws
    is_block = row.get("ReservationType") == "capacity-block"
    if is_block != (aws.capacity == "block"):
        what = f"{name} is {'a' if is_block else 'no'} capacity block"
        yield Obstacle(what, f"fleet.aws.capacity: {'block' if is_block else 'reservation'}")
    if row.get("InstanceType") != wanted:
        yield Obstacle(f"{name} is of {row.get('InstanceType')}, not {wanted}", f"fleet.instance_type: {row.get('InstanceType')}")
    if row.get("AvailabilityZone") != inputs.zone:
        where = f"fleet.aws.zones: [{row.get('AvailabilityZone')}]" + (", and a subnet of yours there" if aws.vpc else "")
        yield Obstacle(f"{name} is in {row.get('AvailabilityZone')}, and the nodes would be in {inputs.zone}", where)
    if row.get("State") != "active":
        begins = f"; it begins {row.get('StartDate')}" if row.get("State") in ("scheduled", "pending", "payment-pending") else ""
        yield Obstacle(f"{name} is {row.get('State')}{begins}", "make setup when it is active")
        return
    there = _mine(config, calls)
    free = int(row.get("AvailableInstanceCount", 0)) + there
    if free < len(inputs.slots):
        yield Obstacle(f"{name} has room for {free} nodes, {len(inputs.slots)} are wanted", f"NODES={free}" if free else "")


def _mine(config: Config, calls: Calls) -> int:
    """How many nodes of this fleet run already."""
    states = [
        row["State"]["Name"] for row in instances(calls, config.fleet_name) if row["InstanceType"] == config.fleet.instance_type
    ]
    return sum(state in ("pending", "running") for state in states)


def subnets(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether your subnet is in the VPC and the zone, with addresses enough: each EFA interface that has one counts."""
    if inputs.subnet is None:
        return
    row: dict[str, Any] = next(iter(calls("ec2", "DescribeSubnets", SubnetIds=[inputs.subnet]).get("Subnets", ())), {})
    if row.get("VpcId") != config.fleet.aws.vpc:
        yield Obstacle(f"{inputs.subnet} is in {row.get('VpcId')}, not in fleet.aws.vpc {config.fleet.aws.vpc}", "fleet.aws.vpc")
    if row.get("AvailabilityZone") != inputs.zone:
        what = f"{inputs.subnet} is in {row.get('AvailabilityZone')}, not in {inputs.zone}"
        yield Obstacle(what, "fleet.aws.subnets: one in that zone")
    each = 1 if inputs.plain == "yes" else addresses(config.fleet.instance_type or "")
    new = len(inputs.slots) - _mine(config, calls)
    makes = makes_file_system(config) and not _has_file_system(config, calls)
    servers = 1 + -(-config.fleet.fsx.size_gib // SERVER) if makes else 0
    free = int(row.get("AvailableIpAddressCount", 0))
    if new * each + servers > free:
        needed = f"{new} nodes with {each} addresses each" + (f" and {servers} for the file system" if servers else "")
        yield Obstacle(f"{inputs.subnet} has {free} free addresses: too few for {needed}", "fleet.aws.subnets: a larger one")


def way_out(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether your subnet has a route to the Internet, from which nodes load drivers and packages."""
    if inputs.subnet is None:
        return
    of_vpc = [{"Name": "vpc-id", "Values": [str(config.fleet.aws.vpc)]}]
    tables = [(row.get("Associations", ()), row.get("Routes", ()))
              for row in calls.pages("ec2", "DescribeRouteTables", "RouteTables", Filters=of_vpc)]  # fmt: skip
    own = [routes for joined, routes in tables if any(one.get("SubnetId") == inputs.subnet for one in joined)]
    own = own or [routes for joined, routes in tables if any(one.get("Main") for one in joined)]
    leads = [route for routes in own for route in routes if route.get("DestinationCidrBlock") == "0.0.0.0/0"]
    if own and not any(route.get("State") != "blackhole" for route in leads):
        what = f"{inputs.subnet} has no route to the Internet: set-up loads drivers and packages from there"
        yield Obstacle(what, "a route to a NAT gateway, or another subnet, if nodes have no mirror of theirs", blocks=False)


def _has_file_system(config: Config, calls: Calls) -> bool:
    rows = calls.pages("fsx", "DescribeFileSystems", "FileSystems")
    return any(is_ours(tags_of(row.get("Tags")), config.fleet_name) for row in rows)


def buckets(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether buckets of yours are there and in the region: FSx is linked to no other, and what leaves a region costs money."""
    named = {
        "fleet.aws.bucket": config.fleet.aws.bucket,
        "fleet.fsx.link": config.fleet.fsx.link and s3.split(config.fleet.fsx.link)[0],
    }
    for key, name in named.items():
        if not name:
            continue
        try:
            region = calls("s3", "HeadBucket", Bucket=name).get("BucketRegion")
        except CloudError as error:
            if error.code not in ("404", "NoSuchBucket", "NotFound"):
                raise
            yield Obstacle(f"{key}: there is no bucket {name}", f"aws s3 mb s3://{name} --region {calls.region}")
            continue
        if region and region != calls.region:
            yield Obstacle(f"{key}: {name} is in {region}, the fleet would be in {calls.region}", f"a bucket in {calls.region}")


CHECKS: tuple[Check, ...] = (allowed, quotas.vcpus, quotas.network, quotas.storage, reservation, subnets, way_out, buckets)
