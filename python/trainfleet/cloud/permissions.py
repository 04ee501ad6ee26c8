"""The actions that making, running and removing a fleet needs, and which of them IAM's simulator denies the caller.

Each is simulated on what it will be done to where that has a name of ours, so that a policy that allows `trainfleet-*` alone is
enough. What a service does in the caller's name through CloudFormation needs the same permissions: it has no role of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..config import Config
from ..storage import s3
from ..trust.errors import CloudError
from . import cluster_permissions, repository
from .calls import Calls
from .roles import allow, written
from .template_inputs import Inputs, bucket_of, cluster_name, stack_name
from .template_storage import log_group, makes_file_system

LOOKS = (  # at what there is, which no resource narrows
    "cloudwatch:GetMetricStatistics", "cloudformation:DescribeStacks", "tag:GetResources", "pricing:GetProducts",
    "servicequotas:ListServiceQuotas", "servicequotas:GetServiceQuota", "servicequotas:GetAWSDefaultServiceQuota",
    "ssm:GetParameter", "ssm:GetParametersByPath", "iam:ListRoles", "iam:SimulatePrincipalPolicy", "iam:ListInstanceProfiles",
    "s3:ListAllMyBuckets", "logs:DescribeLogGroups", "ecr:DescribeRepositories", "ecr:DescribeImages", "ecr:ListTagsForResource",
    "batch:DescribeComputeEnvironments", "batch:DescribeJobQueues", "batch:DescribeJobDefinitions", "sagemaker:ListTrainingJobs",
    "sagemaker:ListTags",
    "fsx:DescribeFileSystems", "fsx:DescribeDataRepositoryAssociations", "fsx:DescribeBackups",
    *(f"ec2:Describe{what}" for what in (
        "Addresses", "AvailabilityZones", "CapacityReservations", "FlowLogs", "Images", "InstanceAttribute",
        "InstanceCreditSpecifications", "InstanceTypeOfferings", "Instances", "InternetGateways", "KeyPairs", "LaunchTemplates",
        "LaunchTemplateVersions", "NatGateways", "NetworkInterfaces", "PlacementGroups", "RouteTables", "SecurityGroupRules",
        "SecurityGroups", "Snapshots", "SpotPriceHistory", "Subnets", "Volumes", "VpcAttribute", "VpcEndpoints", "Vpcs",
    )),
)  # fmt: skip
STACK = (
    "CreateStack", "UpdateStack", "CancelUpdateStack", "DeleteStack", "DescribeStackEvents", "GetTemplate",
    "ListStackResources",
)  # fmt: skip
MACHINES = (
    "RunInstances", "StartInstances", "TerminateInstances", "GetConsoleOutput", "CreateLaunchTemplate",
    "CreateLaunchTemplateVersion", "DeleteLaunchTemplate", "CreatePlacementGroup", "DeletePlacementGroup", "CreateSecurityGroup",
    "DeleteSecurityGroup", "AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress", "RevokeSecurityGroupEgress",
    "RevokeSecurityGroupIngress", "ImportKeyPair", "DeleteKeyPair", "DeleteNetworkInterface", "DeleteVolume", "CreateTags",
    "DeleteTags",
)  # fmt: skip
NETWORK = (
    "CreateVpc", "ModifyVpcAttribute", "DeleteVpc", "CreateSubnet", "ModifySubnetAttribute", "DeleteSubnet",
    "CreateInternetGateway", "AttachInternetGateway", "DetachInternetGateway", "DeleteInternetGateway", "CreateNatGateway",
    "DeleteNatGateway", "AllocateAddress", "AssociateAddress", "DisassociateAddress", "ReleaseAddress", "CreateRouteTable",
    "CreateRoute", "DeleteRoute", "DeleteRouteTable",
    "AssociateRouteTable", "DisassociateRouteTable", "CreateVpcEndpoint", "DeleteVpcEndpoints", "DeleteFlowLogs",
)  # fmt: skip
PLANS = ("SearchTrainingPlanOfferings", "CreateTrainingPlan", "CreateReservedCapacity", "ListTrainingPlans")
BAKING = ("CreateImage", "DeregisterImage", "DeleteSnapshot")
BLOCKS = ("DescribeCapacityBlockOfferings", "PurchaseCapacityBlock")
FILE_SYSTEM = (
    "CreateFileSystem", "DeleteFileSystem", "CreateDataRepositoryAssociation", "DeleteDataRepositoryAssociation", "DeleteBackup",
    "TagResource",
)  # fmt: skip
ROLES = (
    "CreateRole", "GetRole", "TagRole", "ListRoleTags", "ListRolePolicies", "ListAttachedRolePolicies", "DeleteRole",
    "PutRolePolicy", "GetRolePolicy", "DeleteRolePolicy", "AttachRolePolicy", "DetachRolePolicy", "PassRole",
)  # fmt: skip
PROFILES = cluster_permissions.PROFILES
LINKED_BUCKET = ("GetBucketPolicy", "PutBucketPolicy")  # FSx writes into the policy of a bucket that it is linked to
BUCKET = ("CreateBucket", "PutEncryptionConfiguration", "PutBucketPublicAccessBlock", "PutLifecycleConfiguration", *LINKED_BUCKET,
          "DeleteBucketPolicy", "PutBucketTagging", "PutBucketOwnershipControls", "DeleteBucket")  # fmt: skip
REPOSITORY = (
    "CreateRepository", "DeleteRepository", "PutLifecyclePolicy", "TagResource", "ListImages",
    "BatchGetImage", "GetDownloadUrlForLayer", "BatchDeleteImage", "PutImage",
    "BatchCheckLayerAvailability", "InitiateLayerUpload", "UploadLayerPart", "CompleteLayerUpload",
)  # fmt: skip
LOGS = (
    "CreateLogGroup", "PutRetentionPolicy", "TagResource", "ListTagsForResource", "DescribeLogStreams", "DeleteLogGroup",
)  # fmt: skip
STREAMS = ("GetLogEvents", "DeleteLogStream")
DATA = ("ListBucket", "ListBucketVersions", "ListBucketMultipartUploads", "GetBucketLocation", "GetBucketTagging")
OBJECTS = ("GetObject", "PutObject", "DeleteObject", "DeleteObjectVersion", "AbortMultipartUpload")
SECRETS = ("PutParameter", "AddTagsToResource", "DeleteParameter")
ENGINES = {
    "batch": (
        "CreateComputeEnvironment", "UpdateComputeEnvironment", "DeleteComputeEnvironment", "CreateJobQueue", "UpdateJobQueue",
        "DeleteJobQueue", "RegisterJobDefinition", "DeregisterJobDefinition", "SubmitJob", "DescribeJobs", "ListJobs",
        "TerminateJob", "TagResource",
    ),
    "sagemaker": (
        "CreateTrainingJob", "DescribeTrainingJob", "UpdateTrainingJob", "StopTrainingJob", "DeleteTrainingJob", "AddTags",
    ),
}  # fmt: skip
ON_EC2 = ("", "batch")  # whose nodes are instances of the account
CLUSTER = "parallelcluster"
FSX, TO_S3 = "fsx.amazonaws.com", "s3.data-source.lustre.fsx.amazonaws.com"  # of the second there is a role for each file system
ROLES_OF = {"batch": ("batch.amazonaws.com",)}  # an engine's
LINK = "iam:CreateServiceLinkedRole"
MOST = 50  # actions in one request to the simulator
LARGEST = 6_100  # characters of a policy's statements
Policy = dict[str, Any]


def needed(config: Config, inputs: Inputs) -> Iterator[tuple[tuple[str, ...], str]]:
    """(actions, the resource that they are done to) for each group."""
    here, fleet = f"arn:{inputs.partition}:%s:{inputs.region}:{inputs.account}:%s", config.fleet
    if inputs.engine == CLUSTER:
        yield from cluster_permissions.of_cluster(cluster_name(config), inputs.partition, inputs.region, inputs.account)
    if inputs.engine != CLUSTER or not fleet.aws.subnets:
        yield from _of_stack(config, inputs, here)
    if fleet.image == repository.BUILD:
        yield ("ecr:GetAuthorizationToken",), "*"
        yield _of("ecr", REPOSITORY), here % ("ecr", f"repository/{repository.NAME}")
    if inputs.engine in ENGINES:
        plans = PLANS if fleet.sagemaker.plan_hours is not None else ()
        yield _of(inputs.engine, (*ENGINES[inputs.engine], *plans)), "*"
        if fleet.sagemaker.kms_key:
            yield ("kms:DescribeKey",), "*"  # it may be an alias
        if fleet.secrets:
            yield _of("ssm", SECRETS), here % ("ssm", f"parameter/trainfleet/{config.fleet_name}/x")
    if _makes_file_system(config, inputs):
        yield _of("fsx", FILE_SYSTEM), "*"
        yield from _of_links(config, inputs)
    for name in sorted(written(config, inputs)):
        yield _of("s3", DATA), f"arn:{inputs.partition}:s3:::{name}"
        yield _of("s3", OBJECTS), f"arn:{inputs.partition}:s3:::{name}/x"


def _of_stack(config: Config, inputs: Inputs, here: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """What the stack of the config needs, or that of a cluster's network."""
    on_ec2 = inputs.engine in ON_EC2
    yield _of("cloudformation", STACK), here % ("cloudformation", f"stack/{stack_name(config)}/x")
    has_network = inputs.engine in (*ON_EC2, CLUSTER) and not config.fleet.aws.vpc
    if operations := (MACHINES if on_ec2 else ()) + (() if inputs.engine else BAKING) + (NETWORK if has_network else ()):
        yield _of("ec2", operations), "*"
    if inputs.engine == CLUSTER:
        return
    if not inputs.engine and config.fleet.aws.block_hours is not None:
        yield _of("ec2", BLOCKS), "*"
    for kind, operations in (("role", ROLES), ("instance-profile", PROFILES if on_ec2 else ())):
        yield _of("iam", operations), f"arn:{inputs.partition}:iam::{inputs.account}:{kind}/{stack_name(config)}-x"
    yield _of("logs", LOGS), here % ("logs", f"log-group:{log_group(config)}")
    yield _of("logs", STREAMS), here % ("logs", f"log-group:{log_group(config)}:log-stream:x")
    if not inputs.engine and not config.fleet.aws.bucket:
        yield _of("s3", BUCKET), f"arn:{inputs.partition}:s3:::{bucket_of(config, inputs)}"


def _of_links(config: Config, inputs: Inputs) -> Iterator[tuple[tuple[str, ...], str]]:
    """What FSx does in the caller's name for a link to S3: it gives the role of the file system a policy, and the bucket too.

    Source: FSx for Lustre user guide, "Service-linked roles" and "Linking your file system to an S3 bucket", prerequisites.
    """
    fsx, bucket = config.fleet.fsx, config.fleet.aws.bucket
    if _to_s3(config):
        yield ("iam:AttachRolePolicy", "iam:PutRolePolicy"), _linked(inputs, f"{TO_S3}/x")
    if fsx.link:
        name = f"arn:{inputs.partition}:s3:::{s3.split(fsx.link)[0]}"
        yield _of("s3", ("ListBucket", *LINKED_BUCKET)), name
    if fsx.export and bucket:
        yield _of("s3", LINKED_BUCKET), f"arn:{inputs.partition}:s3:::{bucket}"


def _to_s3(config: Config) -> bool:
    return bool(config.fleet.fsx.link or config.fleet.fsx.export)


def _makes_file_system(config: Config, inputs: Inputs) -> bool:
    return inputs.engine in ("", CLUSTER) and makes_file_system(config)


def _of(service: str, operations: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{service}:{operation}" for operation in operations)


def policy(config: Config, inputs: Inputs) -> Policy:
    """A policy that is enough for whoever makes, runs and removes a fleet, for `make plan OUT=`."""
    looks = LOOKS + (cluster_permissions.LOOKS if inputs.engine == CLUSTER else ())
    resources: dict[tuple[str, ...], list[str]] = {looks: ["*"]}
    for actions, resource in needed(config, inputs):
        resources.setdefault(actions, []).append(re.sub(r"(?<=[/:-])x(?=/|$)", "*", resource))
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
