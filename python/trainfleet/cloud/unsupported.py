"""Refuses configs that AWS can't serve, if no request is needed to know it: (key, message) each.
Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from ..config import Config
from ..hardware import node_types
from .instances import capacity_of
from .template_storage import makes_file_system, refuse_size, refuse_unmade

MOST_NODES = 120  # of one stack: its template is sent in the request, which takes 51,200 bytes


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """Yields every reason why AWS can't make the fleet of a config."""
    for rule in (_type, _capacity, _network, _ways_in, _file_system, _size):
        yield from rule(config)


def refuse_of_scheduler(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the same for a stack in which a scheduler makes the machines: AWS Batch."""
    yield from _capacity(config)
    yield from _network(config)


def _type(config: Config) -> Iterator[tuple[str, str]]:
    if config.fleet.instance_type is None:
        yield (
            "fleet.instance_type",
            "null: AWS needs an instance type to make the machines; set one, such as trn1.32xlarge",
        )


def _capacity(config: Config) -> Iterator[tuple[str, str]]:
    aws, capacity, key = config.fleet.aws, capacity_of(config), "fleet.aws.reservation"
    is_bought = capacity == "block" and aws.block_hours is not None
    if capacity in ("reservation", "block") and not aws.reservation and not is_bought:
        yield (
            key,
            f"null: fleet.aws.capacity {capacity} needs a reservation; set its id, such as "
            "cr-0123456789abcdef0",
        )
    if aws.reservation and capacity in ("on-demand", "spot"):
        yield (
            key,
            f"{aws.reservation}: not used with {capacity}; set fleet.aws.capacity reservation or "
            "block, or remove this key",
        )
    if config.fleet.spot and capacity in ("reservation", "block"):
        yield "fleet.spot", f"true: a {capacity} has no spot instances; set false"
    if aws.block_hours is not None and (capacity != "block" or aws.reservation):
        other = "fleet.aws.reservation" if aws.reservation else f"fleet.aws.capacity {capacity}"
        yield (
            "fleet.aws.block_hours",
            f"{aws.block_hours:g}: with {other} no capacity block is bought; set null",
        )
    elif is_bought and config.budget.max_usd is None:
        yield "budget.max_usd", "null: a capacity block is bought only within a limit; set one"
    row = node_types.instance(config.fleet.instance_type)
    if row and capacity != "reservation" and capacity not in row.sold:
        works = f"set {', '.join(sorted(row.sold))} or reservation"
        yield (
            "fleet.aws.capacity",
            f"{capacity}: AWS does not sell {config.fleet.instance_type} this way; {works}",
        )


def _network(config: Config) -> Iterator[tuple[str, str]]:
    aws = config.fleet.aws
    if bool(aws.vpc) != bool(aws.subnets):
        given = "fleet.aws.vpc" if aws.vpc else "fleet.aws.subnets"
        yield given, "set fleet.aws.vpc and fleet.aws.subnets together"
    for zone in aws.zones:
        if aws.region and not zone.startswith(aws.region):
            yield "fleet.aws.zones", f"{zone} is not in fleet.aws.region {aws.region}"


def _ways_in(config: Config) -> Iterator[tuple[str, str]]:
    aws, key = config.fleet.aws, "fleet.aws.allow_ssh_from"
    for given in aws.allow_ssh_from:
        try:
            network = ipaddress.IPv4Network(given)
        except ValueError as error:
            yield key, f"{given} is not a network: {error}"
            continue
        if network.prefixlen < 8:
            yield (
                key,
                f"{given}: nearly the complete Internet; set your address, such as 203.0.113.7/32, "
                "or [] for SSM",
            )
    if aws.bastion_type and aws.vpc:
        yield (
            "fleet.aws.bastion_type",
            f"{aws.bastion_type}: your own VPC is reached through fleet.ssh.jump; set null",
        )
    elif aws.bastion_type and aws.ssm_only:
        yield (
            "fleet.aws.bastion_type",
            f"{aws.bastion_type}: no address may reach it; set fleet.aws.allow_ssh_from, or null "
            "to use SSM",
        )
    elif aws.allow_ssh_from and not aws.vpc and not aws.bastion_type:
        yield (
            key,
            "the nodes have no public address; set fleet.aws.bastion_type, such as c7i.xlarge, "
            "or this key to [] for SSM",
        )


def _file_system(config: Config) -> Iterator[tuple[str, str]]:
    fleet, key = config.fleet, "fleet.shared_folder"
    if not makes_file_system(config):
        yield from refuse_unmade(fleet.fsx)
        return
    yield from refuse_size(fleet.fsx)
    row = node_types.INSTANCE_TYPES.get(fleet.instance_type or "")
    if fleet.fsx.efa and row and not node_types.lustre_efa(row, fleet.nodes):
        unused = f"{row.name} can't reach FSx over EFA, so it would be paid for unused"
        yield (
            "fleet.fsx.efa",
            f"true: {unused}; set false, or use {', '.join(node_types.reach_lustre())}",
        )
    inside = (fleet.shared_folder or "").removeprefix(fleet.fsx.mount_point.rstrip("/"))
    if fleet.fsx.s3_export and not inside.strip("/"):
        yield (
            key,
            f"{fleet.shared_folder} is the complete file system; set "
            f"{fleet.fsx.mount_point.rstrip('/')}/trainfleet",
        )
    elif inside.strip("/").split("/")[0] == "linked":
        yield key, f"{fleet.shared_folder}: fleet.fsx.s3_import appears there; set another folder"


def _size(config: Config) -> Iterator[tuple[str, str]]:
    fleet = config.fleet
    if fleet.nodes > MOST_NODES:
        yield (
            "fleet.nodes",
            f"{fleet.nodes}: one stack makes at most {MOST_NODES}; for more use slurm, "
            "batch or sagemaker",
        )
    if (
        fleet.aws.bastion_type
        and fleet.aws.bastion_type in node_types.INSTANCE_TYPES
        and node_types.INSTANCE_TYPES[fleet.aws.bastion_type].accelerator
    ):
        yield (
            "fleet.aws.bastion_type",
            f"{fleet.aws.bastion_type}: a bastion needs no accelerator; set c7i.xlarge",
        )
