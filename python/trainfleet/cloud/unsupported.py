"""Refuses configs that AWS can't serve, without any request to AWS. Each refusal is a pair of key
and message.
"""

from __future__ import annotations

import ipaddress

from ..config.types import Config, Refusals
from ..hardware import node_types
from .instances import capacity_of
from .template_storage import makes_file_system, refuse_size, refuse_unmade

MOST_NODES = 120  # nodes in one stack: a request holds at most 51,200 bytes of template


def refuse(config: Config) -> Refusals:
    """Yields every reason why AWS can't make the fleet of a config."""
    if config.fleet.instance_type is None:
        why = "AWS needs an instance type to make the machines"
        yield "fleet.instance_type", f"null: {why}; set one, such as trn1.32xlarge"
    yield from refuse_of_scheduler(config)
    for rule in (_ways_in, _file_system, _size):
        yield from rule(config)


def refuse_of_scheduler(config: Config) -> Refusals:
    """Yields the reasons that also apply if AWS Batch makes the machines."""
    for rule in (_reservation, _block, _sold, _network):
        yield from rule(config)


def _buys_block(config: Config) -> bool:
    return capacity_of(config) == "block" and config.fleet.aws.block_hours is not None


def _reservation(config: Config) -> Refusals:
    capacity, key, given = (
        capacity_of(config),
        "fleet.aws.reservation",
        config.fleet.aws.reservation,
    )
    reserves = capacity in ("reservation", "block")
    if reserves and not given and not _buys_block(config):
        why = f"fleet.aws.capacity {capacity} needs a reservation"
        yield key, f"null: {why}; set its id, such as cr-0123456789abcdef0"
    if given and not reserves:
        then = "set fleet.aws.capacity reservation or block, or remove this key"
        yield key, f"{given}: not used with {capacity}; {then}"
    if config.fleet.spot and reserves:
        yield "fleet.spot", f"true: a {capacity} has no spot instances; set false"


def _block(config: Config) -> Refusals:
    aws = config.fleet.aws
    if aws.block_hours is None:
        return
    if aws.reservation or not _buys_block(config):
        capacity = f"fleet.aws.capacity {capacity_of(config)}"
        other = "fleet.aws.reservation" if aws.reservation else capacity
        what = f"{aws.block_hours:g}: with {other} no capacity block is bought; set null"
        yield "fleet.aws.block_hours", what
    elif config.budget.max_usd is None:
        yield "budget.max_usd", "null: a capacity block is bought only within a limit; set one"


def _sold(config: Config) -> Refusals:
    row, capacity = node_types.instance(config.fleet.instance_type), capacity_of(config)
    if row and capacity not in ("reservation", *row.sold):
        works = f"set {', '.join(sorted(row.sold))} or reservation"
        why = f"AWS does not sell {config.fleet.instance_type} this way"
        yield "fleet.aws.capacity", f"{capacity}: {why}; {works}"


def _network(config: Config) -> Refusals:
    aws = config.fleet.aws
    if bool(aws.vpc) != bool(aws.subnets):
        given = "fleet.aws.vpc" if aws.vpc else "fleet.aws.subnets"
        yield given, "set fleet.aws.vpc and fleet.aws.subnets together"
    for zone in aws.zones:
        if aws.region and not zone.startswith(aws.region):
            yield "fleet.aws.zones", f"{zone} is not in fleet.aws.region {aws.region}"


def _ways_in(config: Config) -> Refusals:
    aws, key = config.fleet.aws, "fleet.aws.allow_ssh_from"
    for given in aws.allow_ssh_from:
        try:
            network = ipaddress.IPv4Network(given)
        except ValueError as error:
            yield key, f"{given} is not a network: {error}"
            continue
        if network.prefixlen < 8:
            then = "set your address, such as 203.0.113.7/32, or [] for SSM"
            yield key, f"{given}: nearly the complete Internet; {then}"
    bastion, bastion_key = aws.bastion_type, "fleet.aws.bastion_type"
    if bastion and aws.vpc:
        why = "your own VPC is reached through fleet.ssh.jump"
        yield bastion_key, f"{bastion}: {why}; set null"
    elif bastion and aws.ssm_only:
        then = "set fleet.aws.allow_ssh_from, or null to use SSM"
        yield bastion_key, f"{bastion}: no address may reach it; {then}"
    elif aws.allow_ssh_from and not aws.vpc and not bastion:
        then = "set fleet.aws.bastion_type, such as c7i.xlarge, or this key to [] for SSM"
        yield key, f"the nodes have no public address; {then}"


def _file_system(config: Config) -> Refusals:
    fleet, key = config.fleet, "fleet.shared_folder"
    if not makes_file_system(config):
        yield from refuse_unmade(fleet.fsx)
        return
    yield from refuse_size(fleet.fsx)
    row = node_types.INSTANCE_TYPES.get(fleet.instance_type or "")
    if fleet.fsx.efa and row and not node_types.lustre_efa(row, fleet.nodes):
        unused = f"{row.name} can't reach FSx over EFA, so it would be paid for unused"
        then = f"set false, or use {', '.join(node_types.reach_lustre())}"
        yield "fleet.fsx.efa", f"true: {unused}; {then}"
    top = fleet.fsx.mount_point.rstrip("/")
    inside = (fleet.shared_folder or "").removeprefix(top).strip("/")
    if fleet.fsx.s3_export and not inside:
        what = f"{fleet.shared_folder} is the complete file system"
        yield key, f"{what}; set {top}/trainfleet"
    elif inside.split("/")[0] == "linked":
        yield key, f"{fleet.shared_folder}: fleet.fsx.s3_import appears there; set another folder"


def _size(config: Config) -> Refusals:
    fleet, bastion = config.fleet, config.fleet.aws.bastion_type
    if fleet.nodes > MOST_NODES:
        what = f"{fleet.nodes}: one stack makes at most {MOST_NODES}"
        yield "fleet.nodes", f"{what}; for more use slurm, batch or sagemaker"
    row = node_types.INSTANCE_TYPES.get(bastion or "")
    if row and row.accelerator:
        what = f"{bastion}: a bastion needs no accelerator; set c7i.xlarge"
        yield "fleet.aws.bastion_type", what
