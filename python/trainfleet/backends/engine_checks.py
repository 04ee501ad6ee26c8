"""Checks before a job is submitted to AWS Batch or SageMaker, so that it fails here in a second and
not there in an hour.

Each check makes one or two requests and raises what is wrong with the command that mends it. A
check for which these credentials lack permission (iam:GetRole, for one) passes: the job's own start
will show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from ..cloud import checks, engine_template
from ..cloud.api_errors import DENIED, passing
from ..cloud.calls import Calls
from ..cloud.discovery import placeholders
from ..cloud.quotas import request_more
from ..cloud.roles import statements
from ..cloud.template_inputs import Inputs
from ..cloud.template_storage import log_group
from ..config import Config
from ..hardware import node_types
from ..plan.job import Job
from ..plan.request import Request
from ..storage import s3
from ..trust.errors import BackendError, CloudError
from .queue_reasons import enabling, environments, most_nodes
from .request_json import bodies

ABSENT = ("NoSuchEntity", "NoSuchEntityException")
# of a condition's values, as IAM's simulator has them
KINDS = {"Bool": "boolean", "ForAnyValue:StringEquals": "stringList"}
Statements = Callable[[Config, Inputs], Iterable[dict[str, Any]]]


def require(calls: Calls, config: Config, queue: str, request: Request) -> None:
    """Raises BackendError when AWS Batch could not run this request."""
    what, _ = bodies(request)
    container = what["nodeProperties"]["nodeRangeProperties"][0]["container"]
    require_queue(calls, config, queue, request.job)
    require_bucket(calls, config)
    for key, allowed in (
        ("jobRoleArn", statements),
        ("executionRoleArn", engine_template.of_a_start),
    ):
        if container.get(key, "").startswith("arn:"):
            require_role(calls, container[key], "ecs-tasks.amazonaws.com", config, allowed)


def require_queue(calls: Calls, config: Config, queue: str, job: Job) -> None:
    """Raises BackendError unless the queue takes jobs, and has an environment for that many such
    nodes.
    """
    found = calls("batch", "DescribeJobQueues", jobQueues=[queue]).get("jobQueues", ())
    if not found:
        then = "make setup makes one; or fleet.batch.queue names yours"
        raise BackendError("there is no such job queue", where=queue, next=then)
    if found[0].get("state") == "DISABLED":
        raise BackendError("the job queue is disabled", where=queue, next=enabling(queue))
    if found[0].get("status") == "INVALID":
        raise BackendError(
            "the job queue is invalid",
            where=queue,
            why=found[0].get("statusReason", ""),
            next="make setup",
        )
    unfit = [
        (environment, unfitness(config, environment))
        for environment in environments(calls, found[0])
    ]
    if all(why for _, why in unfit):
        rows = "\n".join(
            f"  {environment['computeEnvironmentName']}: {why}" for environment, why in unfit
        )
        what, then = (
            f"no compute environment of the queue can run this job\n{rows}",
            "make setup; or another fleet.batch.queue",
        )
        raise BackendError(what, where=queue, next=then)
    vcpus = node_types.INSTANCE_TYPES[config.fleet.instance_type or ""].vcpus
    most = max(most_nodes(environment, vcpus) for environment, why in unfit if not why)
    if most < job.nodes:
        what = f"{job.nodes} nodes are wanted, the queue has {most}"
        then = f"NODES={most}" if most else "raise maxvCpus of its compute environment"
        raise BackendError(what, where=queue, why=f"maxvCpus over {vcpus} a node", next=then)


def unfitness(config: Config, environment: dict[str, Any]) -> str:
    """Why a compute environment can't run a multi-node job on the config's instance type; "" when
    it can.

    https://docs.aws.amazon.com/batch/latest/userguide/mnp-ce.html
    """
    resources, wanted = environment.get("computeResources", {}), config.fleet.instance_type or ""
    types = resources.get("instanceTypes", ())
    if environment.get("state") == "DISABLED":
        return "it is disabled"
    if environment.get("status") == "INVALID":
        return f"it is invalid: {environment.get('statusReason', 'no reason is given')}"
    if environment.get("type") == "UNMANAGED":
        return "it is unmanaged, and multi-node jobs run on managed ones alone"
    if resources.get("type") in ("SPOT", "FARGATE", "FARGATE_SPOT"):
        return (
            f"it is of type {resources['type']}, and multi-node jobs run on EC2 on-demand "
            "instances alone"
        )
    if not {wanted, wanted.partition(".")[0], "optimal"} & set(types):
        return f"it has {', '.join(types)}, and no {wanted}"
    return ""


def require_bucket(calls: Calls, config: Config) -> None:
    """Raises BackendError when a bucket of the run is in another region than its nodes."""
    addresses = {config.fleet.shared_folder, config.data.store, config.checkpoint.destination}
    for bucket in sorted({s3.split(address)[0] for address in addresses if address}):
        try:
            there = (
                calls("s3", "GetBucketLocation", Bucket=bucket).get("LocationConstraint")
                or "us-east-1"
            )
        except CloudError as error:
            if error.code == "NoSuchBucket":
                raise BackendError(
                    "there is no such bucket",
                    where=f"s3://{bucket}",
                    next=f"aws s3 mb s3://{bucket}",
                ) from error
            _pass_denied(error)
            continue
        if {"EU": "eu-west-1"}.get(there, there) != calls.region:
            raise BackendError(
                f"the bucket is in {there}, and the nodes are in {calls.region}",
                where=f"s3://{bucket}",
                why="every byte would be paid for, and SageMaker takes no such bucket",
                next=f"a bucket in {calls.region}, or fleet.aws.region: {there}",
            )


def require_role(calls: Calls, arn: str, service: str, config: Config, allowed: Statements) -> None:
    """Raises BackendError when a role is not there, does not trust the service, or may not do what
    a run does by it.
    """
    name = arn.rpartition("/")[2]
    try:
        role = calls("iam", "GetRole", RoleName=name)["Role"]
        trust = role.get("AssumeRolePolicyDocument", {})
        document = json.loads(unquote(trust)) if isinstance(trust, str) else trust
        trusted = [
            part.get("Principal")
            for part in document.get("Statement", ())
            if part.get("Effect") == "Allow"
        ]
        if service not in json.dumps(trusted):
            then = (
                f"aws iam update-assume-role-policy --role-name {name}: allow {service} "
                "sts:AssumeRole"
            )
            raise BackendError(
                f"the role does not trust {service}",
                where=arn,
                why="its trust policy names others",
                next=then,
            )
        _require_statements(calls, arn, config, allowed)
    except CloudError as error:
        if error.code in ABSENT:
            raise BackendError(
                "there is no such role", where=arn, next="make setup makes one; or name yours"
            ) from error
        _pass_denied(error)


def _require_statements(calls: Calls, arn: str, config: Config, allowed: Statements) -> None:
    """Raises BackendError with all that a role may not do of what it would be allowed by the
    stack.
    """
    partition, account = arn.split(":")[1], arn.split(":")[4]
    inputs = replace(
        placeholders(config, calls.region),
        partition=partition,
        account=account,
        engine=config.fleet.backend,
    )
    group = f"arn:{partition}:logs:{calls.region}:{account}:log-group:{log_group(config)}:*"
    missing = list[tuple[str, str]]()
    for statement in allowed(config, inputs):
        where = [
            group if isinstance(found, dict) else str(found) for found in statement["Resource"]
        ]
        if not config.fleet.secrets and where[0].endswith(
            f":parameter/trainfleet/{config.fleet_name}/*"
        ):
            continue
        missing += [(name, where[0]) for name in _refused(calls, arn, statement, where)]
    if missing:
        listed, places = (
            ", ".join(dict(missing)),
            " and ".join(dict.fromkeys(place for _, place in missing)),
        )
        why = "a run does that by it; the role that make setup would make has it"
        raise BackendError(
            f"the role may not do {listed}", where=arn, why=why, next=f"have it allowed on {places}"
        )


def _refused(
    calls: Calls, arn: str, statement: Mapping[str, Any], where: list[str]
) -> Iterator[str]:
    """The actions of a statement that IAM's simulator denies a role on any of these resources."""
    context = [
        {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": KINDS[kind]}
        for kind, keys in statement.get("Condition", {}).items()
        for key, value in keys.items()
    ]
    asked = {"ContextEntries": context} if context else {}
    for resource in where:
        on = {} if resource == "*" else {"ResourceArns": [resource]}
        found = calls.pages(
            "iam",
            "SimulatePrincipalPolicy",
            "EvaluationResults",
            PolicySourceArn=arn,
            ActionNames=statement["Action"],
            **on,
            **asked,
        )
        yield from (
            str(row["EvalActionName"]) for row in found if row.get("EvalDecision") != "allowed"
        )


def require_key(calls: Calls, config: Config) -> None:
    """Raises BackendError when fleet.sagemaker.kms_key is not there, is not enabled, or is shut to
    this account.
    """
    if key := config.fleet.sagemaker.kms_key:
        for found in checks.key_of(f"fleet.sagemaker.kms_key {key}", key, calls):
            raise BackendError(found.what, next=found.next)


def require_quota(calls: Calls, names: Iterable[str], wanted: int, kind: str) -> None:
    """Raises BackendError when a quota of SageMaker, by its name, is below what is wanted."""
    names, quotas = set(names), list[dict[str, Any]]()
    with passing(*DENIED):
        quotas += calls.pages(
            "service-quotas", "ListServiceQuotas", "Quotas", ServiceCode="sagemaker"
        )
    for quota in quotas:
        if quota["QuotaName"] in names and quota["Value"] < wanted:
            raise BackendError(
                f"{wanted} x {kind} are wanted, and your quota is {quota['Value']:g}",
                where=quota["QuotaName"],
                next=request_more(calls.region, "sagemaker", quota["QuotaCode"], wanted),
            )


def _pass_denied(error: CloudError) -> None:
    """Raises an error again that is no mere lack of permission to look."""
    if error.code not in DENIED:
        raise error
