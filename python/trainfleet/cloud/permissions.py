"""Lists the IAM actions required to create, run and remove a fleet, and those that IAM's simulator
denies the caller.

Each action is simulated on its resource if the resource has one of our names, so a policy for
`trainfleet-*` is enough. The stack has no role, so CloudFormation acts with the caller's
permissions, which must cover every service in the stack.
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
from .calls import Calls, Json
from .template_inputs import Inputs, bucket_of, cluster_name, stack_name
from .template_parts import statement, written
from .template_storage import log_group, makes_file_system

FILE = Path(__file__).with_name("permissions.yaml")
# services with a service-linked role; TO_S3 has one per file system
FSX, TO_S3 = ("fsx.amazonaws.com", "s3.data-source.lustre.fsx.amazonaws.com")
SESSION = "document/AWS-StartSSHSession"
LINK = "iam:CreateServiceLinkedRole"
# IAM simulator's value type for each condition operator
TYPES = {"Bool": "boolean", "ForAnyValue:StringEquals": "stringList", "StringEquals": "string"}
# simulator errors that leave it unknown whether an action is allowed
UNSURE = ("AccessDenied", "AccessDeniedException", "NoSuchEntity", "InvalidInput", "ServiceFailure")
MOST = 50  # maximum actions per simulator request
LARGEST = 6_100  # maximum characters of the statements in a policy document
Policy = Json
Needed = Iterator[tuple[tuple[str, ...], str]]  # actions, and their resource


@functools.cache
def _rows() -> list[tuple[str, tuple[str, ...], list[str]]]:
    """Returns each row of permissions.yaml: its kind (see `_names`), its IAM actions, and their
    resources.
    """
    return [
        (
            row["for"],
            tuple(
                f"{service}:{name}" for service, names in row["actions"].items() for name in names
            ),
            row["to"],
        )
        for row in read_table(FILE)
    ]


def needed(config: Config, inputs: Inputs, looks: bool = False) -> Needed:
    """Yields the actions that the config requires on each resource: to create, use and remove it,
    or with `looks` to check what exists.
    """
    found: dict[str, list[str]] = {}
    names = _names(config, inputs)
    here = {key: getattr(inputs, key) for key in ("partition", "region", "account")}
    for kind, actions, places in _rows():
        for place in places if kind.endswith("looks") == looks else ():
            for name in names.get(kind, ()):
                found.setdefault(place.format(it=name, **here), []).extend(actions)
    yield from ((tuple(dict.fromkeys(actions)), place) for place, actions in found.items())


def _names(config: Config, inputs: Inputs) -> dict[str, list[str]]:
    """Returns the names of the resources that a config creates and uses, by kind."""
    aws, kind, stack = config.fleet.aws, inputs.kind, [stack_name(config)]
    of_cluster, plain = kind.by_ssh and not kind.in_zone, not inputs.scheduler
    has_stack = not (of_cluster and aws.subnets)
    names = {
        "looks": stack,
        "cluster looks": stack * of_cluster,
        "cluster": [cluster_name(config)] * of_cluster,
        "stack": stack * has_stack,
        "own": stack * (not of_cluster),
        "instances": stack * kind.in_zone,
        "ec2": stack * plain,
        "network": stack * (has_stack and kind.in_account and not aws.vpc),
        "blocks": stack * (plain and aws.block_hours is not None),
        "log": [log_group(config)] * (not of_cluster),
        "bucket": [bucket_of(config, inputs)] * (plain and not aws.bucket),
        "sessions": [SESSION] * (aws.ssm_only and kind.by_ssh),
        "repository": [repository.NAME] * (config.fleet.container == repository.BUILD),
    }
    return names | _of_jobs(config, inputs) | _of_data(config, inputs)


def _of_jobs(config: Config, inputs: Inputs) -> dict[str, list[str]]:
    """Returns the names of the resources that AWS Batch or SageMaker jobs use."""
    fleet, name = config.fleet, [config.fleet_name]
    if inputs.kind.by_ssh:
        return {}
    roles = (fleet.batch.job_role, fleet.batch.execution_role, fleet.sagemaker.role)
    return {
        inputs.scheduler: name,
        "plans": name * (fleet.sagemaker.plan_hours is not None),
        "own roles": [role for role in roles if role],
        "secrets": name * bool(fleet.secrets),
    }


def _of_data(config: Config, inputs: Inputs) -> dict[str, list[str]]:
    """Returns the buckets that nodes write to, and those that FSx links to."""
    fsx, found = config.fleet.fsx, {"written": sorted(written(config, inputs))}
    if not _makes_file_system(config, inputs):
        return found
    link = [s3.split(fsx.s3_import)[0]] if fsx.s3_import else []
    export = [config.fleet.aws.bucket] if fsx.s3_export and config.fleet.aws.bucket else []
    roles = [TO_S3] * _to_s3(config)
    return found | {"file system": ["x"], "to S3": roles, "link": link, "linked": link + export}


def _to_s3(config: Config) -> bool:
    return bool(config.fleet.fsx.s3_import or config.fleet.fsx.s3_export)


def _makes_file_system(config: Config, inputs: Inputs) -> bool:
    return inputs.kind.by_ssh and makes_file_system(config)


def policy(config: Config, inputs: Inputs) -> Policy:
    """Returns the policy for creating, running and removing a fleet, which `make plan OUT=`
    writes.
    """
    resources: dict[tuple[str, ...], list[str]] = {}
    for actions, resource in (*needed(config, inputs, looks=True), *needed(config, inputs)):
        # The ARN of AWS's SSM document has no account.
        place = resource.replace(f"{inputs.account}:{SESSION}", f"*:{SESSION}")
        resources.setdefault(actions, []).append(re.sub(r"(?<=[/:-])x(?=/|$)", "*", place))
    allowed = [statement(sorted(actions), where) for actions, where in resources.items()]
    if services := sorted(_services(config, inputs)):
        names = {"StringEquals": {"iam:AWSServiceName": services}}
        linked = [_linked(inputs, f"{name}/*") for name in services]
        allowed.append(statement([LINK], linked, names))
    return {"Version": "2012-10-17", "Statement": allowed}


def documents(whole: Policy) -> Iterator[Policy]:
    """Splits the policy into documents within IAM's limit for managed policies: 6,144 characters,
    not counting whitespace.
    """
    left, size = list[Any](), 0
    for part in whole["Statement"]:
        added = len(json.dumps(part, separators=(",", ":"))) + 1
        if left and size + added > LARGEST:
            yield whole | {"Statement": left}
            left, size = [], 0
        left.append(part)
        size += added
    yield whole | {"Statement": left}


def denied(config: Config, calls: Calls, inputs: Inputs) -> list[str]:
    """Returns the actions that IAM's simulator denies the caller. Raises CloudError if the caller
    may not use the simulator.

    Read actions are not simulated, because a denied read is reported when it happens.
    """
    caller = _principal(str(calls("sts", "GetCallerIdentity").get("Arn", "")))
    if caller.endswith(":root"):
        return []  # the root user may do anything, and the simulator does not accept it

    missing = [
        name
        for actions, resource in needed(config, inputs)
        for name in refused(calls, caller, actions, resource)
    ]
    rows = calls.pages("iam", "ListRoles", "Roles", PathPrefix="/aws-service-role/")
    there = {str(row["Path"]) for row in rows}
    for service in _services(config, inputs):
        # AWS creates the service-linked role with the first resource that needs it.
        if service == TO_S3 or f"/aws-service-role/{service}/" not in there:
            named = {"StringEquals": {"iam:AWSServiceName": service}}
            where = _linked(inputs, f"{service}/x")
            missing += [
                f"{one} for {service}" for one in refused(calls, caller, [LINK], where, named)
            ]
    return missing


def refused(
    calls: Calls, who: str, actions: Sequence[str], resource: str, conditions: Policy | None = None
) -> Iterator[str]:
    """Yields the actions on a resource that IAM's simulator denies a user or role.

    `conditions`: context values that the simulator assumes.
    """
    more: Json = {} if resource == "*" else {"ResourceArns": [resource]}
    if conditions:
        more["ContextEntries"] = [
            {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": TYPES[test]}
            for test, keys in conditions.items()
            for key, value in keys.items()
        ]
    for first in range(0, len(actions), MOST):
        more["ActionNames"] = list(actions[first : first + MOST])
        for row in calls.pages(
            "iam", "SimulatePrincipalPolicy", "EvaluationResults", PolicySourceArn=who, **more
        ):
            if row.get("EvalDecision") != "allowed":
                yield str(row.get("EvalActionName"))


def _services(config: Config, inputs: Inputs) -> Iterator[str]:
    """Yields the services that require a service-linked role, which AWS creates on first use."""
    yield from inputs.kind.services
    if _makes_file_system(config, inputs):
        yield FSX
        if _to_s3(config):
            yield TO_S3
    if config.fleet.aws.capacity == "spot":
        yield "spot.amazonaws.com"


def _linked(inputs: Inputs, name: str) -> str:
    return f"arn:{inputs.partition}:iam::{inputs.account}:role/aws-service-role/{name}"


def _principal(arn: str) -> str:
    """Returns the ARN of the user, or of the role behind an assumed-role session."""
    head, _, name = arn.partition(":assumed-role/")
    return f"{head.replace(':sts:', ':iam:')}:role/{name.partition('/')[0]}" if name else arn


def unsure(error: CloudError) -> bool:
    """Returns whether the caller may not use the simulator, or the simulator can't find the
    caller's role, such as a role with a path.
    """
    return error.code in UNSURE
