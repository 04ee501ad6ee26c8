"""The actions that making, running and removing a fleet needs, and which of them IAM's simulator denies the caller.

Each is simulated on what it will be done to where that has a name of ours, so that a policy that allows `trainfleet-*` alone is
enough. What a service does in the caller's name through CloudFormation needs the same permissions: it has no role of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Config
from ..errors import CloudError
from . import repository
from .calls import Calls
from .inputs import Inputs, bucket_of, stack_name
from .storage import log_group, makes_file_system

STACK = ("CreateChangeSet", "ExecuteChangeSet", "DescribeStacks", "DescribeStackEvents", "UpdateStack", "DeleteStack")
MACHINES = (
    "RunInstances", "TerminateInstances", "DescribeInstances", "CreateLaunchTemplate", "CreateLaunchTemplateVersion",
    "DeleteLaunchTemplate", "CreatePlacementGroup", "DeletePlacementGroup", "CreateSecurityGroup", "DeleteSecurityGroup",
    "AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress", "ImportKeyPair", "DeleteKeyPair", "CreateTags",
)  # fmt: skip
NETWORK = (
    "CreateVpc", "DeleteVpc", "CreateSubnet", "DeleteSubnet", "CreateInternetGateway", "AttachInternetGateway",
    "DeleteInternetGateway", "CreateNatGateway", "DeleteNatGateway", "AllocateAddress", "ReleaseAddress", "CreateRouteTable",
    "CreateRoute", "AssociateRouteTable", "CreateVpcEndpoint", "DeleteVpcEndpoints",
)  # fmt: skip
FILE_SYSTEM = ("CreateFileSystem", "DescribeFileSystems", "DeleteFileSystem", "CreateDataRepositoryAssociation", "TagResource")
ROLES = (
    "CreateRole", "DeleteRole", "PutRolePolicy", "DeleteRolePolicy", "AttachRolePolicy", "DetachRolePolicy", "PassRole",
    "CreateInstanceProfile", "DeleteInstanceProfile", "AddRoleToInstanceProfile", "RemoveRoleFromInstanceProfile",
)  # fmt: skip
BUCKET = ("CreateBucket", "PutEncryptionConfiguration", "PutBucketPublicAccessBlock", "PutLifecycleConfiguration",
          "PutBucketPolicy", "PutBucketTagging", "PutBucketOwnershipControls", "DeleteBucket")  # fmt: skip
REPOSITORY = (
    "CreateRepository", "DescribeRepositories", "DeleteRepository", "PutLifecyclePolicy", "TagResource", "ListTagsForResource",
    "DescribeImages", "ListImages", "BatchGetImage", "GetDownloadUrlForLayer", "BatchDeleteImage", "PutImage",
    "BatchCheckLayerAvailability", "InitiateLayerUpload", "UploadLayerPart", "CompleteLayerUpload",
)  # fmt: skip
LOGS = ("CreateLogGroup", "DeleteLogGroup", "PutRetentionPolicy")
MOST = 50  # actions in one request to the simulator


def needed(config: Config, inputs: Inputs) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(service, its operations, the resource they are done to) for each group."""
    here = f"arn:{inputs.partition}:%s:{inputs.region}:{inputs.account}:%s"
    yield "cloudformation", STACK, here % ("cloudformation", f"stack/{stack_name(config)}/x")
    yield "ec2", MACHINES + (() if config.fleet.aws.vpc else NETWORK), "*"
    yield "iam", ROLES, f"arn:{inputs.partition}:iam::{inputs.account}:role/{stack_name(config)}-NodeRole-x"
    if config.fleet.image == repository.BUILD:
        yield "ecr", ("GetAuthorizationToken",), "*"
        yield "ecr", REPOSITORY, here % ("ecr", f"repository/{repository.NAME}")
    yield "logs", LOGS, here % ("logs", f"log-group:{log_group(config)}")
    if makes_file_system(config):
        yield "fsx", FILE_SYSTEM, "*"
    if not config.fleet.aws.bucket:
        yield "s3", BUCKET, f"arn:{inputs.partition}:s3:::{bucket_of(config, inputs)}"


def denied(config: Config, calls: Calls, inputs: Inputs) -> list[str]:
    """The actions that the caller may not do; CloudError where the simulator can't be asked."""
    caller = _principal(str(calls("sts", "GetCallerIdentity").get("Arn", "")))
    if caller.endswith(":root"):
        return []  # which may do anything, and can't be simulated
    missing = []
    for service, operations, resource in needed(config, inputs):
        actions = [f"{service}:{operation}" for operation in operations]
        resources = {} if resource == "*" else {"ResourceArns": [resource]}
        for first in range(0, len(actions), MOST):
            found = calls.pages(
                "iam", "SimulatePrincipalPolicy", "EvaluationResults", PolicySourceArn=caller,
                ActionNames=actions[first : first + MOST], **resources,
            )  # fmt: skip
            missing += [str(row.get("EvalActionName")) for row in found if row.get("EvalDecision") != "allowed"]
    return missing


def _principal(arn: str) -> str:
    """The user or role of an identity: a session is that of its role."""
    head, _, name = arn.partition(":assumed-role/")
    return f"{head.replace(':sts:', ':iam:')}:role/{name.partition('/')[0]}" if name else arn


def unsure(error: CloudError) -> bool:
    """Whether the simulator is closed to the caller, or does not find its role (one with a path)."""
    return error.code in ("AccessDenied", "AccessDeniedException", "NoSuchEntity", "InvalidInput", "ServiceFailure")
