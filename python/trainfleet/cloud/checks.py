"""Checks this machine and the account before a fleet is made or a job is submitted.

All schedulers share the checks. A check yields obstacles, each with the command that helps. A check
that these credentials may not make blocks nothing. The first sentence of a check's docstring is
part of a message.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

from ..config import Config
from ..storage import s3
from ..trust.errors import CloudError
from . import permissions, quotas
from .calls import DENIED, Calls, Row
from .discovery import reservation_of
from .instances import capacity_of
from .quotas import Obstacle, Obstacles
from .template_inputs import Inputs, Scheduler
from .template_storage import log_group

PROGRAMS = ("aws", "session-manager-plugin")
AWS_S = "alias/aws/ebs"  # EBS's default key, which needs no permissions
Check = Callable[[Config, Calls, Inputs], Obstacles]
Statements = Callable[[Config, Inputs], Iterable[Row]]


def require(
    config: Config,
    calls: Calls,
    inputs: Inputs,
    chosen: Iterable[Check] = (),
    what: str = "the fleet can't be made with this config",
) -> None:
    """Raises CloudError with all obstacles to making the fleet, or those of the chosen checks."""
    found = [finding for finding in findings(config, calls, inputs, chosen) if finding.blocks]
    if found:
        listed = "\n".join(f"  - {finding}" for finding in found)
        raise CloudError(f"{what}\n{listed}", where=calls.region, code="Preflight")


def findings(
    config: Config, calls: Calls, inputs: Inputs, chosen: Iterable[Check] = ()
) -> list[Obstacle]:
    """Returns all obstacles and notes. A check that can't run becomes a note."""
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
    """Checks whether this machine has what SSH to the nodes needs: a key, and programs for SSM."""
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
    """Checks whether this machine has the programs for SSH through SSM."""
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
    """Checks whether the caller has the permissions."""
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
    """Checks whether the reservation has room for the nodes, in their type and zone."""
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
            "correct fleet.aws.reservation or fleet.aws.region",
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
    """Checks whether the account's default encryption key of disks can be used."""
    if not calls("ec2", "GetEbsEncryptionByDefault").get("EbsEncryptionByDefault"):
        return
    key = str(calls("ec2", "GetEbsDefaultKmsKeyId")["KmsKeyId"])
    if not key.endswith(AWS_S):
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
    """Checks whether your buckets exist in the region. FSx accepts no others, and traffic between
    regions costs money.
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
    """Checks whether your role exists, trusts the service, and allows what a run does with it."""
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
    """Yields the actions of these statements that a role lacks, each with the first resource."""
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
