"""Looks up in an account what a fleet's template needs: its identity, the zones that offer the
type, the image.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.tokenizing import tokenizing
from ..hosts.platform import load_platform
from ..trust.errors import CloudError, ConfigError, NotAsked
from . import clock
from .api_errors import passing
from .baking import fitting
from .calls import Calls, partition_of
from .instances import capacity_of
from .resource_types import is_ours
from .resource_types import tags_of as tags
from .template_inputs import ENGINES, Inputs, bucket_of

ROOT = "/dev/sda1"  # of Ubuntu's images
USUAL_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


def zones(config: Config, calls: Calls) -> list[str]:
    """The zones to try, in their order: those that the config names, or its reservation or subnets
    are in, or all with the type.

    Raises:
        ConfigError: the region has the type nowhere, or a named zone does not.
    """
    type_, cheap = config.fleet.instance_type or "", config.data.tokenize_instance_type
    offered = _offering(type_, "fleet.instance_type", calls)
    if cheap:  # its machines are in the same subnet
        beside = set(_offering(cheap, "data.tokenize_instance_type", calls))
        if not (offered := [zone for zone in offered if zone in beside]):
            message = f"{calls.region} has no zone with both {type_} and {cheap}"
            raise ConfigError.of(
                "data.tokenize_instance_type",
                message,
                next="another data.tokenize_instance_type, or null",
            )
    wanted = config.fleet.aws.zones
    if strange := [zone for zone in wanted if zone not in offered]:
        message = f"{', '.join(strange)}: {type_} is offered in {', '.join(offered)}"
        raise ConfigError.of("fleet.aws.zones", message, next="one or more of these")
    bound = set(_bound(config, calls))
    return list(wanted) or [zone for zone in offered if zone in bound] or offered


def _offering(type_: str, key: str, calls: Calls) -> list[str]:
    """The zones that have a type, which `key` names; ConfigError where the region has none."""
    rows = calls.pages(
        "ec2",
        "DescribeInstanceTypeOfferings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": [type_]}],
    )
    if found := sorted(row["Location"] for row in rows):
        return found
    message = f"{calls.region} does not have {type_}"
    raise ConfigError.of(
        "fleet.aws.region", message, next=f"another fleet.aws.region, or another {key}"
    )


def _bound(config: Config, calls: Calls) -> list[str]:
    """The zones that the reservation, or else the user's subnets, leave."""
    if row := reservation_of(config, calls):
        return [str(row.get("AvailabilityZone"))]
    if not config.fleet.aws.subnets:
        return []
    return [str(row["AvailabilityZone"]) for row in _subnets(config, calls)]


def _subnets(config: Config, calls: Calls) -> list[Mapping[str, Any]]:
    return list(
        calls.pages("ec2", "DescribeSubnets", "Subnets", SubnetIds=list(config.fleet.aws.subnets))
    )


def reservation_of(config: Config, calls: Calls) -> Mapping[str, Any] | None:
    """The reservation that the nodes are taken from, as EC2 has it; None without one, {} where it
    is not there (checks.py).
    """
    name = config.fleet.aws.reservation
    if not name or capacity_of(config) not in ("reservation", "block"):
        return None
    try:
        found = calls("ec2", "DescribeCapacityReservations", CapacityReservationIds=[name]).get(
            "CapacityReservations", []
        )
    except CloudError as error:
        if "NotFound" in error.code or "Malformed" in error.code:
            return {}
        raise
    return found[0] if found else {}


def discover(
    config: Config,
    calls: Calls,
    zone: str,
    slots: tuple[int, ...],
    is_made: bool = False,
    engine: str = "",
) -> Inputs:
    """Looks up what a template for this zone needs. `is_made`: there is a stack already, and a
    bucket of ours belongs to it.
    """
    who = calls("sts", "GetCallerIdentity")
    created = datetime.datetime.fromtimestamp(clock.now(), datetime.UTC).isoformat(
        timespec="seconds"
    )
    pinned = image_of(config, calls, engine)
    own = None if engine else fitting(config, calls)
    image = own.id if own else pinned
    inputs = Inputs(
        calls.region,
        zone,
        who["Account"],
        who["Arn"].rpartition("/")[2],
        image,
        created,
        slots,
        root=root_of(image, calls),
        head_image=pinned,
        public_key=public_key(config),
        subnet=subnet_in(config, calls, zone),
        group=group_of(config, calls),
        partition=who["Arn"].split(":")[1],
        engine=engine,
        tokenizing=_for_tokenizing(config, calls, engine),
    )
    return replace(inputs, has_bucket=not is_made and bucket_is_there(config, calls, inputs))


def _for_tokenizing(config: Config, calls: Calls, engine: str) -> str:
    """Finds the machine image for data.tokenize_instance_type, which is always that of the cpu
    platform; "" without that key.
    """
    if config.data.tokenize_instance_type is None:
        return ""
    cheap = tokenizing(config)
    return image_of(replace(cheap, fleet=replace(cheap.fleet, platform="cpu")), calls, engine)


def placeholders(config: Config, region: str) -> Inputs:
    """Fills in what a template needs when no account can be asked: what the config says, and zeros
    for the rest.
    """
    aws = config.fleet.aws
    created = datetime.datetime.fromtimestamp(clock.now(), datetime.UTC).isoformat(
        timespec="seconds"
    )
    return Inputs(
        region,
        (*aws.zones, f"{region}a")[0],
        "0" * 12,
        "you",
        aws.ami or f"ami-{'0' * 17}",
        created,
        tuple(range(config.fleet.nodes)),
        public_key=public_key(config),
        subnet=(*aws.subnets, None)[0],
        partition=partition_of(region),
        tokenizing=f"ami-{'0' * 17}" if config.data.tokenize_instance_type else "",
        head_image=aws.ami or f"ami-{'0' * 17}",
    )


def known(config: Config, calls: Calls, engine: str) -> tuple[Inputs, str]:
    """The placeholders with whose account it is, and why that could not be asked; "" where it
    could.
    """
    inputs = replace(placeholders(config, calls.region), engine=engine)
    try:
        who = calls("sts", "GetCallerIdentity")
    except NotAsked as error:
        return inputs, error.what
    return replace(inputs, account=who["Account"], partition=who["Arn"].split(":")[1]), ""


def image_of(config: Config, calls: Calls, engine: str = "") -> str:
    """The machine image: the config's, or that of its stack in the version that
    docker/platforms.lock.yaml pins, for nodes or for AWS Batch; "" for an engine whose machines are
    not seen.

    Raises:
        ConfigError: the region does not have it.
    """
    if config.fleet.aws.ami:
        return config.fleet.aws.ami
    platform = load_platform(config.fleet.platform)
    name = str(getattr(platform, ENGINES[engine].image, ""))
    found = (
        _by_parameter(name, calls)
        if name.startswith("/")
        else _by_name(name, platform.neuron_sdk, calls)
        if name
        else ""
    )
    if found or not name:
        return found
    message = f"null: {calls.region} does not have the image of platform {platform.name}, {name}"
    raise ConfigError.of(
        "fleet.aws.ami",
        message,
        next="an image of that region, as ami-0123456789abcdef0, or another region",
    )


def _by_parameter(name: str, calls: Calls) -> str:
    found = ""
    with passing("ParameterNotFound"):
        found = str(calls("ssm", "GetParameter", Name=name)["Parameter"]["Value"])
    return found


def _by_name(name: str, sdk: str, calls: Calls) -> str:
    """An image of Amazon's own by its name; by a name with a *, the newest whose description names
    that Neuron SDK.

    Source: Neuron DLAMI user guide, "Find a DLAMI by SDK version".
    """
    filters = [{"Name": "name", "Values": [name]}, {"Name": "state", "Values": ["available"]}]
    if "*" in name:
        filters.append({"Name": "description", "Values": [f"*Neuron SDK {sdk}*"]})
    rows = calls(
        "ec2", "DescribeImages", Owners=["amazon"], Filters=filters, IncludeDeprecated=True
    ).get("Images", [])
    return str(max(rows, key=lambda row: str(row.get("CreationDate")))["ImageId"]) if rows else ""


def root_of(image: str, calls: Calls) -> str:
    """Returns the name of the image's root device; the template sets its size."""
    found = calls("ec2", "DescribeImages", ImageIds=[image]).get("Images", []) if image else []
    return str(found[0].get("RootDeviceName") or ROOT) if found else ROOT


def group_of(config: Config, calls: Calls) -> str | None:
    """The placement group that a reservation was made in: only nodes in that very group fill it."""
    if capacity_of(config) != "reservation":
        return None
    return (
        str((reservation_of(config, calls) or {}).get("PlacementGroupArn") or "").rpartition("/")[2]
        or None
    )


def subnet_in(config: Config, calls: Calls, zone: str) -> str | None:
    """The user's own subnet in a zone, None where a network is made; ConfigError where none that is
    named lies there.
    """
    if not config.fleet.aws.subnets:
        return None
    rows = _subnets(config, calls)
    for row in rows:
        if row["AvailabilityZone"] == zone:
            return str(row["SubnetId"])
    there = ", ".join(f"{row['SubnetId']} in {row['AvailabilityZone']}" for row in rows)
    then = "a subnet in that zone, or other fleet.aws.zones"
    raise ConfigError.of("fleet.aws.subnets", f"none is in {zone}: {there}", next=then)


def public_key(config: Config) -> str:
    """The public half of fleet.ssh.key, or of the first usual key in ~/.ssh; "" without one, or
    where the config names a pair.
    """
    if config.fleet.aws.key_pair:
        return ""
    for name in [config.fleet.ssh.key] if config.fleet.ssh.key else USUAL_KEYS:
        with suppress(OSError, UnicodeDecodeError, RuntimeError):
            return Path(f"{name}.pub").expanduser().read_text(encoding="utf-8").strip()
    return ""


def bucket_is_there(config: Config, calls: Calls, inputs: Inputs) -> bool:
    """Tells whether the bucket that would be made was kept by an earlier make clean."""
    found: dict[str, str] = {}
    with passing("NoSuchBucket", "NoSuchTagSet"):
        found = tags(calls("s3", "GetBucketTagging", Bucket=bucket_of(config, inputs))["TagSet"])
    return is_ours(found, config.fleet_name)
