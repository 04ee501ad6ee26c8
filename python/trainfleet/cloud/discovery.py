"""Looks up the account details that a template needs, such as identity, zones and machine image."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..config import Config
from ..config.derive import tokenizing
from ..hosts.platform import load_platform
from ..trust.errors import CloudError, ConfigError, NotAsked
from . import clock
from .baking import fitting
from .calls import Calls, Row, partition_of, passing
from .resource_types import is_ours
from .resource_types import tags_of as tags
from .template import capacity_of
from .template_inputs import SCHEDULERS, Inputs, bucket_of

ROOT = "/dev/sda1"  # root device of Ubuntu images
USUAL_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


def zones(config: Config, calls: Calls) -> list[str]:
    """Returns the zones to try, in order: the config's zones, or else those of its reservation or
    subnets, or else all zones that offer the instance type.

    Raises:
        ConfigError: no zone in the region offers the type, or a configured zone does not.
    """
    type_, cheap = config.fleet.instance_type or "", config.data.tokenize_instance_type
    offered = _offering(type_, "fleet.instance_type", calls)
    if cheap:  # tokenizing machines are in the same subnet
        beside = set(_offering(cheap, "data.tokenize_instance_type", calls))
        offered = [zone for zone in offered if zone in beside]
        if not offered:
            message = f"{calls.region} has no zone with both {type_} and {cheap}"
            then = "set another data.tokenize_instance_type, or null"
            raise ConfigError.of("data.tokenize_instance_type", message, next=then)
    wanted = config.fleet.aws.zones
    if strange := [zone for zone in wanted if zone not in offered]:
        message = f"{', '.join(strange)}: AWS offers {type_} only in {', '.join(offered)}"
        raise ConfigError.of("fleet.aws.zones", message, next="set one or more of these")
    bound = set(_bound(config, calls))
    return list(wanted) or [zone for zone in offered if zone in bound] or offered


def _offering(type_: str, key: str, calls: Calls) -> list[str]:
    """Returns the zones that offer an instance type. Raises ConfigError if no zone does.

    `key`: config key of the type.
    """
    rows = calls.pages(
        "ec2",
        "DescribeInstanceTypeOfferings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": [type_]}],
    )
    if found := sorted(row["Location"] for row in rows):
        return found
    message = f"{calls.region} does not offer {type_}"
    raise ConfigError.of("fleet.aws.region", message, next=f"set another fleet.aws.region or {key}")


def _bound(config: Config, calls: Calls) -> list[str]:
    """Returns the reservation's zone, or else the zones of the user's subnets."""
    if row := reservation_of(config, calls):
        return [str(row.get("AvailabilityZone"))]
    if not config.fleet.aws.subnets:
        return []
    return [str(row["AvailabilityZone"]) for row in _subnets(config, calls)]


def _subnets(config: Config, calls: Calls) -> list[Row]:
    return list(
        calls.pages("ec2", "DescribeSubnets", "Subnets", SubnetIds=list(config.fleet.aws.subnets))
    )


def reservation_of(config: Config, calls: Calls) -> Row | None:
    """Returns EC2's entry for the nodes' reservation. Returns None if the config has no
    reservation, or {} if EC2 can't find it.
    """
    name = config.fleet.aws.reservation
    if not name or capacity_of(config) not in ("reservation", "block"):
        return None
    try:
        answer = calls("ec2", "DescribeCapacityReservations", CapacityReservationIds=[name])
    except CloudError as error:
        if "NotFound" in error.code or "Malformed" in error.code:
            return {}
        raise
    return next(iter(answer.get("CapacityReservations", ())), {})


def discover(
    config: Config,
    calls: Calls,
    zone: str,
    slots: tuple[int, ...],
    is_made: bool = False,
    scheduler: str = "",
) -> Inputs:
    """Returns the account details that a template for this zone needs.

    `is_made`: whether the stack already exists, so that an existing bucket belongs to it.
    """
    who = calls("sts", "GetCallerIdentity")
    pinned = image_of(config, calls, scheduler)
    own = None if scheduler else fitting(config, calls)
    image = own.id if own else pinned
    inputs = Inputs(
        calls.region,
        zone,
        who["Account"],
        who["Arn"].rpartition("/")[2],
        image,
        clock.stamp(),
        slots,
        root=root_of(image, calls),
        head_image=pinned,
        public_key=public_key(config),
        subnet=subnet_in(config, calls, zone),
        group=group_of(config, calls),
        partition=who["Arn"].split(":")[1],
        scheduler=scheduler,
        tokenizing=_for_tokenizing(config, calls, scheduler),
    )
    return replace(inputs, has_bucket=not is_made and bucket_is_there(config, calls, inputs))


def _for_tokenizing(config: Config, calls: Calls, scheduler: str) -> str:
    """Returns the cpu platform's machine image for data.tokenize_instance_type, or "" if that key
    is null.
    """
    if config.data.tokenize_instance_type is None:
        return ""
    cheap = tokenizing(config)
    return image_of(replace(cheap, fleet=replace(cheap.fleet, platform="cpu")), calls, scheduler)


def placeholders(config: Config, region: str) -> Inputs:
    """Returns template inputs without querying an account: values from the config, and placeholders
    for the rest.
    """
    aws = config.fleet.aws
    return Inputs(
        region,
        (*aws.zones, f"{region}a")[0],
        "0" * 12,
        "you",
        aws.ami or f"ami-{'0' * 17}",
        clock.stamp(),
        tuple(range(config.fleet.nodes)),
        public_key=public_key(config),
        subnet=(*aws.subnets, None)[0],
        partition=partition_of(region),
        tokenizing=f"ami-{'0' * 17}" if config.data.tokenize_instance_type else "",
        head_image=aws.ami or f"ami-{'0' * 17}",
    )


def known(config: Config, calls: Calls, scheduler: str) -> tuple[Inputs, str]:
    """Returns placeholder inputs with the account's identity, and why the account could not be
    queried ("" if it could).
    """
    inputs = replace(placeholders(config, calls.region), scheduler=scheduler)
    try:
        who = calls("sts", "GetCallerIdentity")
    except NotAsked as error:
        return inputs, error.what
    return replace(inputs, account=who["Account"], partition=who["Arn"].split(":")[1]), ""


def image_of(config: Config, calls: Calls, scheduler: str = "") -> str:
    """Returns the nodes' machine image: fleet.aws.ami, or the platform's image in
    docker/platforms.lock.yaml. Returns "" for a scheduler that needs no image.

    Raises:
        ConfigError: the region does not have the image.
    """
    if config.fleet.aws.ami:
        return config.fleet.aws.ami
    platform = load_platform(config.fleet.platform)
    name = str(getattr(platform, SCHEDULERS[scheduler].image, ""))
    if not name:
        return ""
    if name.startswith("/"):
        found = _by_parameter(name, calls)
    else:
        found = _by_name(name, platform.neuron_sdk, calls)
    if found:
        return found
    message = f"null: {calls.region} does not have the image of platform {platform.name}, {name}"
    then = "set an image of that region, such as ami-0123456789abcdef0, or another region"
    raise ConfigError.of("fleet.aws.ami", message, next=then)


def _by_parameter(name: str, calls: Calls) -> str:
    found = ""
    with passing("ParameterNotFound"):
        found = str(calls("ssm", "GetParameter", Name=name)["Parameter"]["Value"])
    return found


def _by_name(name: str, sdk: str, calls: Calls) -> str:
    """Returns Amazon's newest image with this name. If the name contains a *, the image's
    description must mention the Neuron SDK version.

    Source: Neuron DLAMI user guide, "Find a DLAMI by SDK version".
    """
    filters = [{"Name": "name", "Values": [name]}, {"Name": "state", "Values": ["available"]}]
    if "*" in name:
        filters.append({"Name": "description", "Values": [f"*Neuron SDK {sdk}*"]})
    named = {"Owners": ["amazon"], "Filters": filters, "IncludeDeprecated": True}
    rows = calls("ec2", "DescribeImages", **named).get("Images", [])
    return str(max(rows, key=lambda row: str(row.get("CreationDate")))["ImageId"]) if rows else ""


def root_of(image: str, calls: Calls) -> str:
    """Returns the image's root device name."""
    found = calls("ec2", "DescribeImages", ImageIds=[image]).get("Images", []) if image else []
    return str(found[0].get("RootDeviceName") or ROOT) if found else ROOT


def group_of(config: Config, calls: Calls) -> str | None:
    """Returns the reservation's placement group, which its nodes must join, or None."""
    if capacity_of(config) != "reservation":
        return None
    arn = (reservation_of(config, calls) or {}).get("PlacementGroupArn") or ""
    return str(arn).rpartition("/")[2] or None


def subnet_in(config: Config, calls: Calls, zone: str) -> str | None:
    """Returns the user's subnet in a zone, or None if the stack creates the subnet. Raises
    ConfigError if no configured subnet is in the zone.
    """
    if not config.fleet.aws.subnets:
        return None
    rows = _subnets(config, calls)
    for row in rows:
        if row["AvailabilityZone"] == zone:
            return str(row["SubnetId"])
    there = ", ".join(f"{row['SubnetId']} in {row['AvailabilityZone']}" for row in rows)
    then = "set a subnet in that zone, or other fleet.aws.zones"
    raise ConfigError.of("fleet.aws.subnets", f"no subnet is in {zone}: {there}", next=then)


def public_key(config: Config) -> str:
    """Returns the public key of fleet.ssh.key, or of the first default key found in ~/.ssh. Returns
    "" if no key is found, or if the config names a key pair.
    """
    if config.fleet.aws.key_pair:
        return ""
    for name in [config.fleet.ssh.key] if config.fleet.ssh.key else USUAL_KEYS:
        with suppress(OSError, UnicodeDecodeError, RuntimeError):
            return Path(f"{name}.pub").expanduser().read_text(encoding="utf-8").strip()
    return ""


def bucket_is_there(config: Config, calls: Calls, inputs: Inputs) -> bool:
    """Returns whether an earlier `make clean` kept the bucket that the stack would create."""
    found: dict[str, str] = {}
    with passing("NoSuchBucket", "NoSuchTagSet"):
        found = tags(calls("s3", "GetBucketTagging", Bucket=bucket_of(config, inputs))["TagSet"])
    return is_ours(found, config.fleet_name)
