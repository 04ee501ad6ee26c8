"""Checks before anything is made: this machine's key and programs; permissions, quotas,
reservation, network, keys, buckets.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from ..config import Config
from ..storage import s3
from ..trust.errors import CloudError
from . import permissions, quotas, vpc
from .api_errors import DENIED, passing
from .calls import Calls
from .discovery import reservation_of
from .instance_networking import addresses, interfaces
from .instances import capacity_of
from .quotas import Obstacle
from .resource_types import instances, is_ours, tags_of
from .template_inputs import Inputs
from .template_storage import makes_file_system

PROGRAMS = ("aws", "session-manager-plugin")
LUSTRE = 988  # FSx's port for its clients
AWS_S = "alias/aws/ebs"  # the key of EBS that needs nobody's leave
# GiB: FSx takes about one address of the subnet for each so much of a file system, and one for its
# metadata
SERVER = 1200
Check = Callable[[Config, Calls, Inputs], Iterator[Obstacle]]


def require(config: Config, calls: Calls, inputs: Inputs) -> None:
    """CloudError with all that keeps the fleet from being made."""
    found = [finding for finding in findings(config, calls, inputs) if finding.blocks]
    if found:
        listed = "\n".join(f"  - {finding}" for finding in found)
        raise CloudError(
            f"the fleet can't be made as it is\n{listed}", where=calls.region, code="Preflight"
        )


def findings(config: Config, calls: Calls, inputs: Inputs) -> list[Obstacle]:
    """All findings. What can't be checked is reported, and blocks nothing."""
    chosen = [check for check, engines in CHECKS.items() if inputs.engine in engines]
    return [
        *here(config, inputs),
        *(finding for check in chosen for finding in _tried(check, config, calls, inputs)),
    ]


def here(config: Config, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether this machine has what reaching the nodes needs: a key, and the programs of SSH
    through SSM.
    """
    aws, own = config.fleet.aws, config.fleet.ssh.key
    if inputs.engine in permissions.ENGINES:
        return
    if not (aws.key_pair or inputs.public_key):
        what = (
            f"{own}, and {own}.pub can't be read" if own else "null, and ~/.ssh has no public key"
        )
        is_there = own and Path(own).expanduser().exists()
        then = (
            f"ssh-keygen -y -f {own} > {own}.pub"
            if is_there
            else f"ssh-keygen -t ed25519 -f {own or '~/.ssh/id_ed25519'}"
        )
        yield Obstacle(
            f"fleet.ssh.key: {what}: nobody could log in to the machines",
            f"{then}; or fleet.aws.key_pair",
        )
    if aws.ssm_only:
        yield from programs()


def programs() -> Iterator[Obstacle]:
    """Whether this machine has what SSH through SSM needs."""
    for program in PROGRAMS:
        if not shutil.which(program):
            then = (
                "install the AWS CLI and its Session Manager plugin; or open SSH with "
                "fleet.aws.ssh_from"
            )
            yield Obstacle(f"SSH through SSM needs {program}, which is not here", then)


def _tried(check: Check, config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    try:
        yield from check(config, calls, inputs)
    except CloudError as error:
        if error.code in DENIED:
            yield Obstacle(
                f"not looked at, as {error.what}: "
                f"{(check.__doc__ or '').partition(':')[0].rstrip('.')}",
                blocks=False,
            )
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
        yield Obstacle(
            "no capacity block is held for the nodes",
            "make setup shows what is offered, and buys it with YES=1",
        )
    elif row := reservation_of(config, calls):
        yield from _against(row, config, calls, inputs)
    elif row is not None:
        what = f"there is no {config.fleet.aws.reservation} in {calls.region}"
        yield Obstacle(what, "fleet.aws.reservation, or fleet.aws.region")


def _against(
    row: Mapping[str, Any], config: Config, calls: Calls, inputs: Inputs
) -> Iterator[Obstacle]:
    """All that a reservation has against this fleet."""
    name, wanted, aws = config.fleet.aws.reservation, config.fleet.instance_type, config.fleet.aws
    is_block = row.get("ReservationType") == "capacity-block"
    if is_block != (aws.capacity == "block"):
        what = f"{name} is {'a' if is_block else 'no'} capacity block"
        yield Obstacle(what, f"fleet.aws.capacity: {'block' if is_block else 'reservation'}")
    if row.get("InstanceType") != wanted:
        yield Obstacle(
            f"{name} is of {row.get('InstanceType')}, not {wanted}",
            f"fleet.instance_type: {row.get('InstanceType')}",
        )
    if row.get("AvailabilityZone") != inputs.zone:
        where = f"fleet.aws.zones: [{row.get('AvailabilityZone')}]" + (
            ", and a subnet of yours there" if aws.vpc else ""
        )
        yield Obstacle(
            f"{name} is in {row.get('AvailabilityZone')}, and the nodes would be in {inputs.zone}",
            where,
        )
    if row.get("State") != "active":
        begins = (
            f"; it begins {row.get('StartDate')}"
            if row.get("State") in ("scheduled", "pending", "payment-pending")
            else ""
        )
        yield Obstacle(f"{name} is {row.get('State')}{begins}", "make setup when it is active")
        return
    there = _mine(config, calls)
    free = int(row.get("AvailableInstanceCount", 0)) + there
    if free < len(inputs.slots):
        yield Obstacle(
            f"{name} has room for {free} nodes, {len(inputs.slots)} are wanted",
            f"NODES={free}" if free else "",
        )


def _mine(config: Config, calls: Calls) -> int:
    """How many nodes of this fleet run already."""
    states = [
        row["State"]["Name"]
        for row in instances(calls, config.fleet_name)
        if row["InstanceType"] == config.fleet.instance_type
    ]
    return sum(state in ("pending", "running") for state in states)


def subnets(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether your subnets are in the VPC and the zone, with room for the nodes and a way out."""
    own = (*config.fleet.sagemaker.subnets, *filter(None, [inputs.subnet]))
    rows = {str(row["SubnetId"]): row for row in _described(calls, own)}
    for name in own:
        if name not in rows:
            yield Obstacle(
                f"there is no subnet {name} in {calls.region}",
                "another one, or another fleet.aws.region",
            )
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
    """Of engines that make no instances themselves: nothing, as nodes are where their subnet is."""
    name, network, zone = row["SubnetId"], row.get("VpcId"), row.get("AvailabilityZone")
    if inputs.engine in permissions.ON_EC2 and network != config.fleet.aws.vpc:
        yield Obstacle(
            f"{name} is in {network}, not in fleet.aws.vpc {config.fleet.aws.vpc}", "fleet.aws.vpc"
        )
    if inputs.engine in permissions.ON_EC2 and zone != inputs.zone:
        yield Obstacle(
            f"{name} is in {zone}, not in {inputs.zone}", "fleet.aws.subnets: one in that zone"
        )


def _roomy(
    row: Mapping[str, Any], config: Config, calls: Calls, inputs: Inputs
) -> Iterator[Obstacle]:
    """Whether a subnet has addresses enough: each EFA interface that has one counts."""
    each = 1 if inputs.plain == "yes" else addresses(config.fleet.instance_type or "")
    new = len(inputs.slots) - _mine(config, calls)
    makes = makes_file_system(config) and not _has_file_system(config, calls)
    servers = 1 + -(-config.fleet.fsx.size_gib // SERVER) if makes else 0
    free = int(row.get("AvailableIpAddressCount", 0))
    if new * each + servers > free:
        needed = f"{new} nodes with {each} addresses each" + (
            f" and {servers} for the file system" if servers else ""
        )
        yield Obstacle(
            f"{row['SubnetId']} has {free} free addresses: too few for {needed}", "a larger subnet"
        )


def _open(
    row: Mapping[str, Any], config: Config, calls: Calls, inputs: Inputs
) -> Iterator[Obstacle]:
    """Whether a subnet has a route to the Internet, from which nodes load drivers and packages, and
    that nodes can take.
    """
    what, routes = "", _routes(calls, row)
    leads = [route for route in routes if route.get("DestinationCidrBlock") == vpc.ANYWHERE]
    if routes and not any(route.get("State") != "blackhole" for route in leads):
        what = "has no route to the Internet: set-up loads drivers and packages from there"
    elif (
        leads
        and all(str(route.get("GatewayId")).startswith("igw-") for route in leads)
        and not _public(config, row, inputs)
    ):
        what = "leads to the Internet by a gateway, and nodes have no public address there"
    if what:
        then = (
            "a route to a NAT gateway, or another subnet, if nodes have no mirror and no "
            "endpoints of theirs"
        )
        yield Obstacle(f"{row['SubnetId']} {what}", then, blocks=False)


def _routes(calls: Calls, subnet: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The routes of a subnet: those of its own table, or else of its network's main one."""
    of_vpc = [{"Name": "vpc-id", "Values": [str(subnet.get("VpcId"))]}]
    tables = list(calls.pages("ec2", "DescribeRouteTables", "RouteTables", Filters=of_vpc))
    for key, value in (("SubnetId", subnet.get("SubnetId")), ("Main", True)):
        for row in tables:
            if any(one.get(key) == value for one in row.get("Associations", ())):
                return list(row.get("Routes", ()))
    return []


def _public(config: Config, subnet: Mapping[str, Any], inputs: Inputs) -> bool:
    """Whether a node gets a public address: EC2 gives none to one of several network interfaces."""
    is_alone = inputs.plain == "yes" or len(interfaces(config.fleet.instance_type or "")) == 1
    return (
        bool(subnet.get("MapPublicIpOnLaunch"))
        and is_alone
        and inputs.engine not in permissions.ENGINES
    )


def walls(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether security groups of yours let nodes reach each other, and your file system."""
    groups = set(config.fleet.sagemaker.security_groups)
    for row in _groups(calls, groups):
        for way, key in (("in from", "IpPermissions"), ("out to", "IpPermissionsEgress")):
            rules = [rule for rule in row.get(key, ()) if rule.get("IpProtocol") == "-1"]
            if not any(
                pair.get("GroupId") in groups
                for rule in rules
                for pair in rule.get("UserIdGroupPairs", ())
            ):
                what = (
                    f"{row['GroupId']} does not let all traffic {way} itself, which EFA and "
                    "the ranks need"
                )
                yield Obstacle(
                    what, "a rule of the group for all traffic, with the group itself", blocks=False
                )
    system = (config.fleet.fsx.dns_name or "").partition(".")[0]
    if inputs.subnet and re.fullmatch("fs-[0-9a-f]{8,}", system):
        with passing("FileSystemNotFound"):  # it may be another account's
            yield from _of_file_system(system, calls, inputs.subnet)


def _of_file_system(system: str, calls: Calls, subnet: str) -> Iterator[Obstacle]:
    """Whether a file system lets the subnet in: the group of nodes is new, so that only a rule by
    address can.
    """
    (row,) = calls("fsx", "DescribeFileSystems", FileSystemIds=[system])["FileSystems"]
    card = row["NetworkInterfaceIds"][:1]
    cards = calls.pages(
        "ec2", "DescribeNetworkInterfaces", "NetworkInterfaces", NetworkInterfaceIds=card
    )
    groups = {one["GroupId"] for card in cards for one in card.get("Groups", ())}
    cidr = next(iter(_described(calls, [subnet])), {"CidrBlock": vpc.ANYWHERE})["CidrBlock"]
    rules = [rule for group in _groups(calls, groups) for rule in group.get("IpPermissions", ())]
    if not any(_lets_in(rule, cidr) for rule in rules):
        what = (
            f"no security group of {system} lets nodes of {subnet} in, {cidr}: Lustre needs "
            "TCP 988 and 1018-1023"
        )
        then = (
            f"aws ec2 authorize-security-group-ingress --group-id {min(groups)} --protocol "
            f"tcp --port 988-1023 --cidr {cidr}"
        )
        yield Obstacle(what, f"{then} --region {calls.region}", blocks=False)


def _lets_in(rule: Mapping[str, Any], cidr: str) -> bool:
    is_port = rule.get("IpProtocol") == "-1" or rule.get("FromPort", 1) <= LUSTRE <= rule.get(
        "ToPort", 0
    )
    nodes, ranges = (
        ip_network(cidr),
        [ip_network(one["CidrIp"]) for one in rule.get("IpRanges", ())],
    )
    return is_port and any(nodes.subnet_of(one) for one in ranges)  # type: ignore[arg-type]


def _groups(calls: Calls, ids: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    if wanted := sorted(ids):
        yield from calls.pages("ec2", "DescribeSecurityGroups", "SecurityGroups", GroupIds=wanted)


def disks(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether disks that the account encrypts by itself can be made with its key."""
    if not calls("ec2", "GetEbsEncryptionByDefault").get("EbsEncryptionByDefault"):
        return
    key = str(calls("ec2", "GetEbsDefaultKmsKeyId")["KmsKeyId"])
    if not key.endswith(AWS_S):
        who = (
            "AWSServiceRoleForAutoScaling"
            if inputs.engine in permissions.ENGINES
            else "your credentials"
        )
        what = (
            f"the account encrypts disks with {key}; instances end at once unless its policy "
            f"lets {who} use and grant it"
        )
        yield from key_of("the account's default key of EBS", key, calls)
        yield Obstacle(
            what,
            f"aws kms get-key-policy --key-id {key} --policy-name default --region {calls.region}",
            blocks=False,
        )


def kms(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether fleet.sagemaker.kms_key can be used."""
    if key := config.fleet.sagemaker.kms_key:
        yield from key_of(f"fleet.sagemaker.kms_key {key}", key, calls)
        if key.startswith("arn:") and key.split(":")[4] != inputs.account:
            what = (
                f"fleet.sagemaker.kms_key {key}: it is another account's, whose policy must "
                "let the job's role use it"
            )
            yield Obstacle(
                what,
                "ask who has the key; kms:GenerateDataKey, Decrypt, Encrypt and CreateGrant",
                blocks=False,
            )


def key_of(where: str, key: str, calls: Calls) -> Iterator[Obstacle]:
    """What is against a KMS key: it is not there, is not enabled, or is shut to this account."""
    theirs = key.split(":")[4] if key.startswith("arn:") else ""
    try:
        state = calls("kms", "DescribeKey", KeyId=key)["KeyMetadata"].get("KeyState", "Enabled")
    except CloudError as error:
        if error.code == "NotFoundException":
            yield Obstacle(f"{where}: there is no such key", f"a key of {calls.region}, or null")
        elif error.code in DENIED and theirs not in (
            "",
            calls("sts", "GetCallerIdentity").get("Account"),
        ):
            what = f"{where}: the key of account {theirs} is shut to yours"
            yield Obstacle(what, "have its policy allow your account, or use a key of yours")
        elif error.code not in DENIED:
            raise
        return
    if state != "Enabled":
        yield Obstacle(
            f"{where}: the key is {state}", f"aws kms enable-key --key-id {key}; or another key"
        )


def key_pair(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether the key pair that the config names is there."""
    name = config.fleet.aws.key_pair
    try:
        if name:
            calls("ec2", "DescribeKeyPairs", KeyNames=[name])
    except CloudError as error:
        if "NotFound" not in error.code:
            raise
        then = (
            "fleet.aws.key_pair: null, which makes one of fleet.ssh.key; or aws ec2 "
            f"import-key-pair --region {calls.region}"
        )
        yield Obstacle(f"fleet.aws.key_pair: {calls.region} has no key pair {name}", then)


def _has_file_system(config: Config, calls: Calls) -> bool:
    rows = calls.pages("fsx", "DescribeFileSystems", "FileSystems")
    return any(is_ours(tags_of(row.get("Tags")), config.fleet_name) for row in rows)


def buckets(config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Whether buckets of yours are there and in the region: FSx is linked to no other, and what
    leaves a region costs money.
    """
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
            yield Obstacle(
                f"{key}: there is no bucket {name}",
                f"aws s3 mb s3://{name} --region {calls.region}",
            )
            continue
        if region and region != calls.region:
            yield Obstacle(
                f"{key}: {name} is in {region}, the fleet would be in {calls.region}",
                f"a bucket in {calls.region}",
            )


MADE, SAGEMAKER = (*permissions.ON_EC2, permissions.CLUSTER), ("sagemaker",)
CHECKS: dict[Check, tuple[str, ...]] = {  # and the engines that it is for
    allowed: (*MADE, *SAGEMAKER),
    quotas.vcpus: MADE,
    quotas.network: MADE,
    quotas.storage: MADE,
    reservation: permissions.ON_EC2,
    subnets: (*MADE, *SAGEMAKER),
    walls: (*MADE, *SAGEMAKER),
    disks: MADE,
    kms: SAGEMAKER,
    key_pair: ("", permissions.CLUSTER),
    buckets: (*MADE, *SAGEMAKER),
}
