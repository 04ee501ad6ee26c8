"""The actions that making, running and removing a fleet needs, and which of them IAM's simulator denies the caller.

Each is simulated on what it will be done to where that has a name of ours, so that a policy that allows `trainfleet-*` alone is
enough. What a service does in the caller's name through CloudFormation needs the same permissions: it has no role of its own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.tables import read_table
from ..storage import s3
from ..trust.errors import CloudError
from . import repository
from .calls import Calls
from .roles import allow, written
from .template_inputs import Inputs, bucket_of, cluster_name, stack_name
from .template_storage import log_group, makes_file_system

FILE = Path(__file__).with_name("permissions.yaml")
ENGINES = ("batch", "sagemaker")
ON_EC2 = ("", "batch")  # whose nodes are instances of the account
CLUSTER = "parallelcluster"
FSX, TO_S3 = "fsx.amazonaws.com", "s3.data-source.lustre.fsx.amazonaws.com"  # of the second there is a role for each file system
ROLES_OF = {"batch": ("batch.amazonaws.com",)}  # an engine's
SESSION = "document/AWS-StartSSHSession"
LINK = "iam:CreateServiceLinkedRole"
MOST = 50  # actions in one request to the simulator
LARGEST = 6_100  # characters of a policy's statements
Policy = dict[str, Any]
Needed = Iterator[tuple[tuple[str, ...], str]]  # actions, and the resource that they are done to


@functools.cache
def _groups() -> dict[str, tuple[str, ...]]:
    """The actions of each group of permissions.yaml, as IAM has them: `ec2:CreateTags`."""
    return {
        name: tuple(f"{service}:{operation}" for service, operations in group.items() for operation in operations)
        for name, group in read_table(FILE).items()
    }


def needed(config: Config, inputs: Inputs) -> Needed:
    """What each group of actions is done to."""
    group = _groups()
    here, fleet = f"arn:{inputs.partition}:%s:{inputs.region}:{inputs.account}:%s", config.fleet
    if inputs.engine == CLUSTER:
        yield from _of_cluster(cluster_name(config), inputs.partition, inputs.account, here)
    if inputs.engine != CLUSTER or not fleet.aws.subnets:
        yield from _of_stack(config, inputs, here)
    if fleet.aws.ssm_only and inputs.engine not in ENGINES:
        for service, what in (("ec2", "instance/x"), ("ssm", SESSION)):
            yield group["sessions"], here % (service, what)
    if fleet.image == repository.BUILD:
        yield ("ecr:GetAuthorizationToken",), "*"
        yield group["repository"], here % ("ecr", f"repository/{repository.NAME}")
    if inputs.engine in ENGINES:
        yield from _of_jobs(config, inputs.engine, here)
    if _makes_file_system(config, inputs):
        yield group["file system"], "*"
        yield from _of_links(config, inputs)
    for name in sorted(written(config, inputs)):
        yield group["data"], f"arn:{inputs.partition}:s3:::{name}"
        yield group["objects"], f"arn:{inputs.partition}:s3:::{name}/x"


def _of_jobs(config: Config, engine: str, here: str) -> Needed:
    """What the jobs of AWS Batch or SageMaker need."""
    group, fleet = _groups(), config.fleet
    plans = group["plans"] if fleet.sagemaker.plan_hours is not None else ()
    yield (*group[engine], *plans), "*"
    for role in filter(None, (fleet.batch.job_role, fleet.batch.execution_role, fleet.sagemaker.role)):
        yield group["own role"], role
    if fleet.secrets:
        yield group["secrets"], here % ("ssm", f"parameter/trainfleet/{config.fleet_name}/x")


def _of_stack(config: Config, inputs: Inputs, here: str) -> Needed:
    """What the stack of the config needs, or that of a cluster's network."""
    group, on_ec2 = _groups(), inputs.engine in ON_EC2
    yield group["stack"], here % ("cloudformation", f"stack/{stack_name(config)}/x")
    has_network = inputs.engine in (*ON_EC2, CLUSTER) and not config.fleet.aws.vpc
    chosen = {"machines": on_ec2, "baking": not inputs.engine, "network": has_network}
    if actions := tuple(action for name, is_in in chosen.items() if is_in for action in group[name]):
        yield actions, "*"
    if inputs.engine == CLUSTER:
        return
    if not inputs.engine and config.fleet.aws.block_hours is not None:
        yield group["blocks"], "*"
    for kind, actions in (("role", group["roles"]), ("instance-profile", group["profiles"] if on_ec2 else ())):
        yield actions, f"arn:{inputs.partition}:iam::{inputs.account}:{kind}/{stack_name(config)}-x"
    yield group["logs"], here % ("logs", f"log-group:{log_group(config)}")
    yield group["streams"], here % ("logs", f"log-group:{log_group(config)}:log-stream:x")
    if not inputs.engine and not config.fleet.aws.bucket:
        yield group["bucket"], f"arn:{inputs.partition}:s3:::{bucket_of(config, inputs)}"


def _of_links(config: Config, inputs: Inputs) -> Needed:
    """What FSx does in the caller's name for a link to S3: it gives the role of the file system a policy, and the bucket too.

    Source: FSx for Lustre user guide, "Service-linked roles" and "Linking your file system to an S3 bucket", prerequisites.
    """
    fsx, bucket, linked = config.fleet.fsx, config.fleet.aws.bucket, _groups()["linked bucket"]
    if _to_s3(config):
        yield ("iam:AttachRolePolicy", "iam:PutRolePolicy"), _linked(inputs, f"{TO_S3}/x")
    if fsx.link:
        name = f"arn:{inputs.partition}:s3:::{s3.split(fsx.link)[0]}"
        yield ("s3:ListBucket", *linked), name
    if fsx.export and bucket:
        yield linked, f"arn:{inputs.partition}:s3:::{bucket}"


def _to_s3(config: Config) -> bool:
    return bool(config.fleet.fsx.link or config.fleet.fsx.export)


def _makes_file_system(config: Config, inputs: Inputs) -> bool:
    return inputs.engine in ("", CLUSTER) and makes_file_system(config)


def _of_cluster(name: str, partition: str, account: str, here: str) -> Needed:
    """What ParallelCluster's command and its stack need of the caller for the cluster with this name."""
    iam = f"arn:{partition}:iam::{account}:%s/parallelcluster/{name}%s"
    group = {name.removeprefix(f"{CLUSTER}-"): actions for name, actions in _groups().items() if name.startswith(CLUSTER)}
    for end in ("", "-x"):  # the stack and those inside it, whose names begin with its own
        yield group["stack"], here % ("cloudformation", f"stack/{name}{end}/x")
    for end in ("/x", "-x"):
        yield group["roles"], iam % ("role", end)
    yield _groups()["profiles"], iam % ("instance-profile", "/x")
    yield ("iam:GetPolicy",), f"arn:{partition}:iam::aws:policy/x"
    yield group["machines"], "*"
    yield group["functions"], here % ("lambda", "function:pcluster-x")
    for table in ("", "slurm-"):
        yield group["tables"], here % ("dynamodb", f"table/parallelcluster-{table}{name}")
    for log in (f"/aws/parallelcluster/{name}-x", "/aws/lambda/pcluster-x"):
        yield group["logs"], here % ("logs", f"log-group:{log}")
    yield group["alarms"], here % ("cloudwatch", f"alarm:{name}-x")
    yield group["boards"], f"arn:{partition}:cloudwatch::{account}:dashboard/{name}-x"
    yield group["zones"], "*"
    yield group["bucket"], f"arn:{partition}:s3:::parallelcluster-x"
    yield group["objects"], f"arn:{partition}:s3:::parallelcluster-x/x"


def policy(config: Config, inputs: Inputs) -> Policy:
    """A policy that is enough for whoever makes, runs and removes a fleet, for `make plan OUT=`."""
    looks = _groups()["looks"] + (_groups()[f"{CLUSTER}-looks"] if inputs.engine == CLUSTER else ())
    resources: dict[tuple[str, ...], list[str]] = {looks: ["*"]}
    for actions, resource in needed(config, inputs):
        place = resource.replace(f"{inputs.account}:{SESSION}", f"*:{SESSION}")  # AWS's own, in whose ARN it may name no account
        resources.setdefault(actions, []).append(re.sub(r"(?<=[/:-])x(?=/|$)", "*", place))
    allowed = [allow(sorted(actions), where) for actions, where in resources.items() if actions]
    if services := sorted(_services(config, inputs)):
        names = {"StringEquals": {"iam:AWSServiceName": services}}
        allowed.append(allow([LINK], [_linked(inputs, f"{name}/*") for name in services], names))
    return {"Version": "2012-10-17", "Statement": allowed}


def documents(whole: Policy) -> Iterator[Policy]:
    """The policy in as many as IAM takes it in: a managed policy holds 6,144 characters without white space."""
    left, size = list[Any](), 0
    for statement in whole["Statement"]:
        added = len(json.dumps(statement, separators=(",", ":"))) + 1
        if left and size + added > LARGEST:
            yield whole | {"Statement": left}
            left, size = [], 0
        left.append(statement)
        size += added
    yield whole | {"Statement": left}


def denied(config: Config, calls: Calls, inputs: Inputs) -> list[str]:
    """The actions that the caller may not do; CloudError where the simulator can't be asked.

    Those that only look are not simulated: what may not be looked at is told where it is looked at, or is not needed.
    """
    caller = _principal(str(calls("sts", "GetCallerIdentity").get("Arn", "")))
    if caller.endswith(":root"):
        return []  # which may do anything, and can't be simulated

    def refused(actions: Sequence[str], resource: str, **more: Any) -> list[str]:
        where = {} if resource == "*" else {"ResourceArns": [resource]}
        found = calls.pages("iam", "SimulatePrincipalPolicy", "EvaluationResults", PolicySourceArn=caller,
                            ActionNames=list(actions), **where, **more)  # fmt: skip
        return [str(row.get("EvalActionName")) for row in found if row.get("EvalDecision") != "allowed"]

    missing = []
    for actions, resource in needed(config, inputs):
        for first in range(0, len(actions), MOST):
            missing += refused(actions[first : first + MOST], resource)
    there = {str(row["Path"]) for row in calls.pages("iam", "ListRoles", "Roles", PathPrefix="/aws-service-role/")}
    for service in _services(config, inputs):
        if service == TO_S3 or f"/aws-service-role/{service}/" not in there:  # AWS makes it with the first that needs it
            entry = {"ContextKeyName": "iam:AWSServiceName", "ContextKeyValues": [service], "ContextKeyType": "string"}
            missing += [
                f"{one} for {service}" for one in refused([LINK], _linked(inputs, f"{service}/x"), ContextEntries=[entry])
            ]
    return missing


def _services(config: Config, inputs: Inputs) -> Iterator[str]:
    """Those that act in the account by a role of their own, which is made for the first who uses them."""
    yield from ROLES_OF.get(inputs.engine, ())
    if _makes_file_system(config, inputs):
        yield FSX
        if _to_s3(config):
            yield TO_S3
    if config.fleet.aws.capacity == "spot":
        yield "spot.amazonaws.com"


def _linked(inputs: Inputs, name: str) -> str:
    return f"arn:{inputs.partition}:iam::{inputs.account}:role/aws-service-role/{name}"


def _principal(arn: str) -> str:
    """The user or role of an identity: a session is that of its role."""
    head, _, name = arn.partition(":assumed-role/")
    return f"{head.replace(':sts:', ':iam:')}:role/{name.partition('/')[0]}" if name else arn


def unsure(error: CloudError) -> bool:
    """Whether the simulator is closed to the caller, or does not find its role (one with a path)."""
    return error.code in ("AccessDenied", "AccessDeniedException", "NoSuchEntity", "InvalidInput", "ServiceFailure")
