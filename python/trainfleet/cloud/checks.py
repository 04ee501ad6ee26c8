"""Checks the config, this machine and the account before a fleet is created or a job submitted.

Each check yields obstacles, with the command that fixes them. A check that these credentials may
not run only yields a note. The first sentence of a check's docstring is part of a message. `refuse`
sends no requests to AWS.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

from ..config.types import Config, Refusals
from ..hardware import node_types
from ..storage import s3
from ..trust.errors import CloudError
from . import permissions, quotas
from .calls import DENIED, Calls, Row
from .discovery import reservation_of
from .quotas import Obstacle, Obstacles
from .template import capacity_of
from .template_inputs import Inputs, Scheduler
from .template_storage import log_group, makes_file_system, refuse_size, refuse_unmade

PROGRAMS = ("aws", "session-manager-plugin")
Check = Callable[[Config, Calls, Inputs], Obstacles]
Statements = Callable[[Config, Inputs], Iterable[Row]]


def require(
    config: Config,
    calls: Calls,
    inputs: Inputs,
    chosen: Iterable[Check] = (),
    what: str = "the fleet can't be made with this config",
) -> None:
    """Raises a CloudError listing the obstacles found by all checks, or by the chosen ones."""
    found = [finding for finding in findings(config, calls, inputs, chosen) if finding.blocks]
    if found:
        listed = "\n".join(f"  - {finding}" for finding in found)
        raise CloudError(f"{what}\n{listed}", where=calls.region, code="Preflight")


def findings(
    config: Config, calls: Calls, inputs: Inputs, chosen: Iterable[Check] = ()
) -> list[Obstacle]:
    """Returns all obstacles and notes. A check that can't run is reported as a note."""
    return [
        *(() if chosen else here(config, inputs)),
        *(
            finding
            for check in chosen or of_kind(inputs.kind)
            for finding in _tried(check, config, calls, inputs)
        ),
    ]


def of_kind(kind: Scheduler) -> Iterator[Check]:
    """Yields the checks that apply to this scheduler."""
    yield allowed
    if kind.in_account:
        yield from (quotas.vcpus, quotas.network, quotas.storage)
    else:
        yield quotas.training
    if kind.in_zone:
        yield reservation
    yield from (quotas.subnets, quotas.walls)
    if kind.in_account:
        yield disks
    if kind.by_ssh:
        yield key_pair
    yield from (kms, buckets)


def here(config: Config, inputs: Inputs) -> Obstacles:
    """Checks whether this machine has an SSH key for the nodes and, if needed, SSM programs."""
    aws, own = config.fleet.aws, config.fleet.ssh.key
    if not inputs.kind.by_ssh:
        return
    if not (aws.key_pair or inputs.public_key):
        what = "null, and ~/.ssh has no public key"
        then = f"ssh-keygen -t ed25519 -f {own or '~/.ssh/id_ed25519'}"
        if own:
            what = f"{own}, and {own}.pub can't be read"
            if Path(own).expanduser().exists():
                then = f"ssh-keygen -y -f {own} > {own}.pub"
        yield Obstacle(
            f"fleet.ssh.key: {what}; nobody could log in to the machines",
            f"{then}; or set fleet.aws.key_pair",
        )
    if aws.ssm_only:
        yield from programs()


def programs() -> Obstacles:
    """Checks whether this machine has the programs that SSH through SSM requires."""
    for program in PROGRAMS:
        if not shutil.which(program):
            plugin = "install the AWS CLI and its Session Manager plugin"
            yield Obstacle(
                f"SSH through SSM needs {program}, which is not installed here",
                f"{plugin}; or open SSH with fleet.aws.allow_ssh_from",
            )


def _tried(check: Check, config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    try:
        yield from check(config, calls, inputs)
    except CloudError as error:
        if error.code not in DENIED:
            raise
        words = str(getattr(check, "func", check).__doc__).removeprefix("Checks ").split()
        subject = re.split(r"[:.](?: |$)", " ".join(words))[0]
        yield Obstacle(f"not checked ({error.what}): {subject}", blocks=False)


def allowed(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether the caller has the required permissions."""
    try:
        missing = permissions.denied(config, calls, inputs)
    except CloudError as error:
        if not permissions.unsure(error):
            raise
        yield Obstacle(f"your permissions were not checked: {error.what}", blocks=False)
        return
    if missing:
        then = "allow these actions, or use other credentials (AWS_PROFILE)"
        yield Obstacle(f"your credentials may not do {', '.join(missing)}", then)


def reservation(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether the reservation has room for the nodes, and matches their type and zone."""
    if capacity_of(config) == "block" and not config.fleet.aws.reservation:
        yield Obstacle(
            "the nodes have no capacity block yet",
            "run make setup to see the offers, and make setup YES=1 to buy one",
        )
    elif row := reservation_of(config, calls):
        yield from _against(row, config, calls, inputs)
    elif row is not None:
        yield Obstacle(
            f"{config.fleet.aws.reservation} does not exist in {calls.region}",
            "fix fleet.aws.reservation or fleet.aws.region",
        )


def _against(row: Row, config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Yields every mismatch between the reservation and this fleet."""
    name, wanted, aws = config.fleet.aws.reservation, config.fleet.instance_type, config.fleet.aws
    kind, zone, state = (row.get(key) for key in ("InstanceType", "AvailabilityZone", "State"))
    is_block = row.get("ReservationType") == "capacity-block"
    if is_block != (aws.capacity == "block"):
        what = f"{name} is {'a' if is_block else 'not a'} capacity block"
        yield Obstacle(what, f"set fleet.aws.capacity: {'block' if is_block else 'reservation'}")
    if kind != wanted:
        yield Obstacle(f"{name} reserves {kind}, not {wanted}", f"set fleet.instance_type: {kind}")
    if zone != inputs.zone:
        subnet = ", and a subnet there" if aws.vpc else ""
        what = f"{name} is in {zone}, but the nodes would be in {inputs.zone}"
        yield Obstacle(what, f"set fleet.aws.zones: [{zone}]{subnet}")
    if state != "active":
        is_ahead = state in ("scheduled", "pending", "payment-pending")
        begins = f"; it begins {row.get('StartDate')}" if is_ahead else ""
        yield Obstacle(f"{name} is {state}{begins}", "run make setup when it is active")
        return
    free = int(row.get("AvailableInstanceCount", 0)) + quotas.mine(config, calls)
    if free < len(inputs.slots):
        what = f"{name} has room for {free} nodes, but the config asks for {len(inputs.slots)}"
        yield Obstacle(what, f"NODES={free}" if free else "")


def disks(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether the account's default disk encryption key can be used."""
    if not calls("ec2", "GetEbsEncryptionByDefault").get("EbsEncryptionByDefault"):
        return
    key = str(calls("ec2", "GetEbsDefaultKmsKeyId")["KmsKeyId"])
    if not key.endswith("alias/aws/ebs"):  # AWS's own key needs no extra permissions
        who = "your credentials" if inputs.kind.by_ssh else "AWSServiceRoleForAutoScaling"
        why = f"instances end at once unless its policy lets {who} use and grant it"
        show = f"aws kms get-key-policy --key-id {key} --policy-name default"
        yield from key_of("the account's default key of EBS", key, calls)
        yield Obstacle(
            f"the account encrypts disks with {key}; {why}",
            f"run {show} --region {calls.region}",
            blocks=False,
        )


def kms(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether fleet.sagemaker.kms_key can be used."""
    if key := config.fleet.sagemaker.kms_key:
        yield from key_of(f"fleet.sagemaker.kms_key {key}", key, calls)
        if key.startswith("arn:") and key.split(":")[4] != inputs.account:
            why = "belongs to another account; its policy must let the job's role use it"
            yield Obstacle(
                f"fleet.sagemaker.kms_key {key} {why}",
                "ask the key's owner to allow kms:GenerateDataKey, Decrypt, Encrypt, CreateGrant",
                blocks=False,
            )


def key_of(where: str, key: str, calls: Calls) -> Obstacles:
    """Yields an obstacle if a KMS key does not exist, is not enabled, or denies this account."""
    theirs = key.split(":")[4] if key.startswith("arn:") else ""
    try:
        state = calls("kms", "DescribeKey", KeyId=key)["KeyMetadata"].get("KeyState", "Enabled")
    except CloudError as error:
        if error.code == "NotFoundException":
            yield Obstacle(f"{where}: it does not exist", f"set a key of {calls.region}, or null")
        elif error.code not in DENIED:
            raise
        elif theirs and theirs != calls("sts", "GetCallerIdentity").get("Account"):
            what = f"{where}: the key of account {theirs} is closed to your account"
            yield Obstacle(what, "allow your account in its policy, or use your account's key")
        return
    if state != "Enabled":
        then = f"aws kms enable-key --key-id {key}; or set another"
        yield Obstacle(f"{where}: the key is {state}", then)


def key_pair(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether the config's key pair exists."""
    name = config.fleet.aws.key_pair
    try:
        if name:
            calls("ec2", "DescribeKeyPairs", KeyNames=[name])
    except CloudError as error:
        if "NotFound" not in error.code:
            raise
        then = f"run aws ec2 import-key-pair --region {calls.region}"
        yield Obstacle(
            f"fleet.aws.key_pair: {calls.region} has no key pair {name}",
            f"set fleet.aws.key_pair: null to make one from fleet.ssh.key, or {then}",
        )


def buckets(config: Config, calls: Calls, inputs: Inputs) -> Obstacles:
    """Checks whether your buckets exist in the fleet's region. FSx accepts only those, and
    cross-region traffic costs money.
    """
    addresses = {
        "checkpoint.path": config.checkpoint.path,
        "data.tokenized_path": config.data.tokenized_path,
        "fleet.shared_folder": config.fleet.shared_folder,
        "fleet.fsx.s3_import": config.fleet.fsx.s3_import,
    }
    named = {
        s3.split(where)[0]: key
        for key, where in addresses.items()
        if where and where.startswith(s3.SCHEME)
    }
    if config.fleet.aws.bucket:
        named[config.fleet.aws.bucket] = "fleet.aws.bucket"
    for name, key in named.items():
        try:
            region = calls("s3", "HeadBucket", Bucket=name).get("BucketRegion")
        except CloudError as error:
            if error.code not in ("404", "NoSuchBucket", "NotFound"):
                raise
            yield Obstacle(
                f"{key}: the bucket {name} does not exist",
                f"run aws s3 mb s3://{name} --region {calls.region}",
            )
            continue
        if region and region != calls.region:
            yield Obstacle(
                f"{key}: {name} is in {region}, but the nodes are in {calls.region}",
                f"use a bucket in {calls.region}, or set fleet.aws.region: {region}",
                blocks=key.startswith("fleet.") or not inputs.kind.by_ssh,
            )


def role(
    arn: str, service: str, allowed: Statements, config: Config, calls: Calls, inputs: Inputs
) -> Obstacles:
    """Checks whether your role exists, trusts the service, and allows everything a run needs."""
    name = arn.rpartition("/")[2]
    try:
        trust = calls("iam", "GetRole", RoleName=name)["Role"].get("AssumeRolePolicyDocument", {})
    except CloudError as error:
        if error.code not in ("NoSuchEntity", "NoSuchEntityException"):
            raise
        yield Obstacle(f"{arn}: the role does not exist", "run make setup, or name your own")
        return
    document = json.loads(unquote(trust)) if isinstance(trust, str) else trust
    allows = [part for part in document.get("Statement", ()) if part.get("Effect") == "Allow"]
    if service not in json.dumps([part.get("Principal") for part in allows]):
        then = f"run aws iam update-assume-role-policy --role-name {name} to allow"
        yield Obstacle(
            f"{arn}: the role does not trust {service}", f"{then} {service} sts:AssumeRole"
        )
    missing = dict(_missing(arn, allowed(config, inputs), config, calls, inputs))
    if missing:
        yield Obstacle(
            f"{arn}: the role lacks {', '.join(missing)}, which a run needs",
            f"allow it on {' and '.join(dict.fromkeys(missing.values()))}",
        )


def _missing(
    arn: str,
    allowed: Iterable[Row],
    config: Config,
    calls: Calls,
    inputs: Inputs,
) -> Iterator[tuple[str, str]]:
    """Yields the actions that a role lacks, each with the first resource of its statement."""
    home = f"{inputs.region}:{inputs.account}"
    group = f"arn:{inputs.partition}:logs:{home}:log-group:{log_group(config)}:*"
    secrets = f":parameter/trainfleet/{config.fleet_name}/*"
    for statement in allowed:
        where = [group if isinstance(one, dict) else str(one) for one in statement["Resource"]]
        if not config.fleet.secrets and where[0].endswith(secrets):
            continue
        for resource in where:
            for name in permissions.refused(
                calls, arn, statement["Action"], resource, statement.get("Condition")
            ):
                yield name, where[0]


MOST_NODES = 120  # maximum nodes per stack: a request is limited to 51,200 bytes of template


def refuse(config: Config) -> Refusals:
    """Yields every reason why the config's fleet can't be created on AWS."""
    if config.fleet.instance_type is None:
        why = "AWS needs an instance type to create the machines"
        yield "fleet.instance_type", f"null: {why}; set one, such as trn1.32xlarge"
    yield from refuse_of_scheduler(config)
    for rule in (_ways_in, _file_system, _size):
        yield from rule(config)


def refuse_of_scheduler(config: Config) -> Refusals:
    """Yields the reasons that also apply to AWS Batch."""
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
        what = f"{fleet.shared_folder} is the entire file system"
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
