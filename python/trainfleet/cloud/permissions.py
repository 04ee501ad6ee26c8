"""The actions that making, running and removing a fleet needs, and which of them IAM's simulator denies the caller.

Each is simulated on what it will be done to where that has a name of ours, so that a policy that allows `trainfleet-*` alone is
enough. What a service does in the caller's name through CloudFormation needs the same permissions: it has no role of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..config import Config
from ..errors import CloudError
from . import repository
from .calls import Calls
from .inputs import Inputs, bucket_of, stack_name
from .roles import allow, written
from .storage import log_group, makes_file_system

LOOKS = (  # at what there is, which no resource narrows
    "cloudwatch:GetMetricStatistics", "tag:GetResources", "servicequotas:ListServiceQuotas", "ssm:GetParameter", "iam:ListRoles",
    "iam:SimulatePrincipalPolicy", "iam:ListInstanceProfiles", "s3:ListAllMyBuckets", "logs:DescribeLogGroups",
    "fsx:DescribeFileSystems",
    *(f"ec2:Describe{what}" for what in (
        "Addresses", "AvailabilityZones", "CapacityReservations", "Images", "InstanceTypeOfferings", "Instances",
        "InternetGateways", "KeyPairs", "LaunchTemplates", "NatGateways", "NetworkInterfaces", "PlacementGroups", "RouteTables",
        "SecurityGroups", "SpotPriceHistory", "Subnets", "Volumes", "VpcEndpoints", "Vpcs",
    )),
)  # fmt: skip
STACK = (
    "CreateStack", "UpdateStack", "CancelUpdateStack", "DeleteStack", "DescribeStacks", "DescribeStackEvents", "GetTemplate",
    "ListStackResources",
)  # fmt: skip
MACHINES = (
    "RunInstances", "StartInstances", "TerminateInstances", "GetConsoleOutput", "CreateLaunchTemplate",
    "CreateLaunchTemplateVersion", "DeleteLaunchTemplate", "CreatePlacementGroup", "DeletePlacementGroup", "CreateSecurityGroup",
    "DeleteSecurityGroup", "AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress", "RevokeSecurityGroupEgress",
    "ImportKeyPair", "DeleteKeyPair", "CreateTags",
)  # fmt: skip
NETWORK = (
    "CreateVpc", "ModifyVpcAttribute", "DeleteVpc", "CreateSubnet", "ModifySubnetAttribute", "DeleteSubnet",
    "CreateInternetGateway", "AttachInternetGateway", "DetachInternetGateway", "DeleteInternetGateway", "CreateNatGateway",
    "DeleteNatGateway", "AllocateAddress", "AssociateAddress", "ReleaseAddress", "CreateRouteTable", "CreateRoute",
    "DeleteRouteTable", "AssociateRouteTable", "DisassociateRouteTable", "CreateVpcEndpoint", "DeleteVpcEndpoints",
)  # fmt: skip
BLOCKS = ("DescribeCapacityBlockOfferings", "PurchaseCapacityBlock")
FILE_SYSTEM = ("CreateFileSystem", "DeleteFileSystem", "CreateDataRepositoryAssociation", "TagResource")
ROLES = (
    "CreateRole", "GetRole", "TagRole", "ListRoleTags", "ListRolePolicies", "ListAttachedRolePolicies", "DeleteRole",
    "PutRolePolicy", "DeleteRolePolicy", "AttachRolePolicy", "DetachRolePolicy", "PassRole",
)  # fmt: skip
PROFILES = ("CreateInstanceProfile", "DeleteInstanceProfile", "AddRoleToInstanceProfile", "RemoveRoleFromInstanceProfile")
BUCKET = ("CreateBucket", "PutEncryptionConfiguration", "PutBucketPublicAccessBlock", "PutLifecycleConfiguration",
          "PutBucketPolicy", "PutBucketTagging", "PutBucketOwnershipControls", "DeleteBucket")  # fmt: skip
REPOSITORY = (
    "CreateRepository", "DescribeRepositories", "DeleteRepository", "PutLifecyclePolicy", "TagResource", "ListTagsForResource",
    "DescribeImages", "ListImages", "BatchGetImage", "GetDownloadUrlForLayer", "BatchDeleteImage", "PutImage",
    "BatchCheckLayerAvailability", "InitiateLayerUpload", "UploadLayerPart", "CompleteLayerUpload",
)  # fmt: skip
LOGS = (
    "CreateLogGroup", "PutRetentionPolicy", "TagResource", "ListTagsForResource", "DescribeLogStreams", "DeleteLogGroup",
)  # fmt: skip
STREAMS = ("GetLogEvents", "DeleteLogStream")
DATA = ("ListBucket", "ListBucketVersions", "ListBucketMultipartUploads", "GetBucketLocation", "GetBucketTagging")
OBJECTS = ("GetObject", "PutObject", "DeleteObject", "DeleteObjectVersion", "AbortMultipartUpload")
SECRETS = ("PutParameter", "AddTagsToResource", "GetParametersByPath", "DeleteParameter")
ENGINES = {
    "batch": (
        "CreateComputeEnvironment", "UpdateComputeEnvironment", "DeleteComputeEnvironment", "DescribeComputeEnvironments",
        "CreateJobQueue", "UpdateJobQueue", "DeleteJobQueue", "DescribeJobQueues", "RegisterJobDefinition",
        "DescribeJobDefinitions", "DeregisterJobDefinition", "SubmitJob", "DescribeJobs", "ListJobs", "TerminateJob",
        "TagResource",
    ),
    "sagemaker": (
        "CreateTrainingJob", "DescribeTrainingJob", "ListTrainingJobs", "UpdateTrainingJob", "StopTrainingJob",
        "DeleteTrainingJob", "AddTags", "ListTags",
    ),
}  # fmt: skip
ON_EC2 = ("", "batch")  # whose nodes are instances of the account
LINKED = ("batch.amazonaws.com", "fsx.amazonaws.com", "spot.amazonaws.com", "s3.data-source.lustre.fsx.amazonaws.com")
ROLES_OF = {"batch": ("batch.amazonaws.com",)}  # an engine's
LINK = "iam:CreateServiceLinkedRole"
MOST = 50  # actions in one request to the simulator


def needed(config: Config, inputs: Inputs) -> Iterator[tuple[tuple[str, ...], str]]:
    """(actions, the resource that they are done to) for each group."""
    here, fleet = f"arn:{inputs.partition}:%s:{inputs.region}:{inputs.account}:%s", config.fleet
    yield _of("cloudformation", STACK), here % ("cloudformation", f"stack/{stack_name(config)}/x")
    on_ec2 = inputs.engine in ON_EC2
    if on_ec2:
        yield _of("ec2", MACHINES + (() if fleet.aws.vpc else NETWORK)), "*"
    if not inputs.engine and fleet.aws.block_hours is not None:
        yield _of("ec2", BLOCKS), "*"
    for kind, operations in (("role", ROLES), ("instance-profile", PROFILES if on_ec2 else ())):
        yield _of("iam", operations), f"arn:{inputs.partition}:iam::{inputs.account}:{kind}/{stack_name(config)}-x"
    if fleet.image == repository.BUILD:
        yield ("ecr:GetAuthorizationToken",), "*"
        yield _of("ecr", REPOSITORY), here % ("ecr", f"repository/{repository.NAME}")
    yield _of("logs", LOGS), here % ("logs", f"log-group:{log_group(config)}")
    yield _of("logs", STREAMS), here % ("logs", f"log-group:{log_group(config)}:log-stream:x")
    if not inputs.engine and makes_file_system(config):
        yield _of("fsx", FILE_SYSTEM), "*"
    if not fleet.aws.bucket:
        yield _of("s3", BUCKET), f"arn:{inputs.partition}:s3:::{bucket_of(config, inputs)}"
    if inputs.engine:
        yield _of(inputs.engine, ENGINES[inputs.engine]), "*"
    if inputs.engine and fleet.secrets:
        yield _of("ssm", SECRETS), here % ("ssm", f"parameter/trainfleet/{config.fleet_name}/x")
    for name in sorted(written(config, inputs)):
        yield _of("s3", DATA), f"arn:{inputs.partition}:s3:::{name}"
        yield _of("s3", OBJECTS), f"arn:{inputs.partition}:s3:::{name}/x"


def _of(service: str, operations: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{service}:{operation}" for operation in operations)


def policy(config: Config, inputs: Inputs) -> dict[str, Any]:
    """A policy that is enough for whoever makes, runs and removes a fleet, for `make plan OUT=`."""
    resources: dict[tuple[str, ...], list[str]] = {LOOKS: ["*"]}
    for actions, resource in needed(config, inputs):
        resources.setdefault(actions, []).append(re.sub(r"(?<=[/:-])x$", "*", resource))
    allowed = [allow(sorted(actions), where) for actions, where in resources.items() if actions]
    names = {"StringEquals": {"iam:AWSServiceName": list(LINKED)}}
    return {"Version": "2012-10-17", "Statement": [*allowed, allow([LINK], [_linked(inputs, "*")], names)]}


def denied(config: Config, calls: Calls, inputs: Inputs) -> list[str]:
    """The actions that the caller may not do; CloudError where the simulator can't be asked.

    Those of LOOKS are not simulated: what may not be looked at is told where it is looked at, or is not needed.
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
        if f"/aws-service-role/{service}/" not in there:  # AWS makes it with the first thing that needs it
            entry = {"ContextKeyName": "iam:AWSServiceName", "ContextKeyValues": [service], "ContextKeyType": "string"}
            missing += [
                f"{one} for {service}" for one in refused([LINK], _linked(inputs, f"{service}/x"), ContextEntries=[entry])
            ]
    return missing


def _services(config: Config, inputs: Inputs) -> Iterator[str]:
    """Those that act in the account by a role of their own, which is made for the first who uses them."""
    yield from ROLES_OF.get(inputs.engine, ())
    if not inputs.engine and makes_file_system(config):
        yield "fsx.amazonaws.com"
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
