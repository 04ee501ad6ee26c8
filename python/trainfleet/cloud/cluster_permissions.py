"""The actions that ParallelCluster's command and its stack need of the caller for one cluster, each with its resource.

Source: AWS's own policies for callers, cloudformation/policies/parallelcluster-policies.yaml of aws/aws-parallelcluster (read
2026-11-25), without login nodes, EFS, AWS Batch and images. tests/oracles/test_permissions.py compares this with the stack that
ParallelCluster 3.16.1 renders from the recipe and with the requests in its code.
"""

from __future__ import annotations

from collections.abc import Iterator

Needed = Iterator[tuple[tuple[str, ...], str]]

LOOKS = (
    "cloudwatch:DescribeAlarms", "iam:ListRoleTags", "logs:DescribeMetricFilters", "resource-groups:GetGroupConfiguration",
    "resource-groups:ListGroupResources",
    *(f"ec2:Describe{what}" for what in ("CapacityBlockStatus", "ImageAttribute", "InstanceTypes")),
)  # fmt: skip
STACK = (
    "CreateStack", "UpdateStack", "DeleteStack", "DescribeStackEvents", "DescribeStackResource",
    "DescribeStackResources", "GetTemplate", "ListStackResources",
)  # fmt: skip
MACHINES = (
    "RunInstances", "TerminateInstances", "CreateLaunchTemplate", "CreateLaunchTemplateVersion", "DeleteLaunchTemplate",
    "CreatePlacementGroup", "DeletePlacementGroup", "CreateSecurityGroup", "DeleteSecurityGroup", "AuthorizeSecurityGroupEgress",
    "AuthorizeSecurityGroupIngress", "RevokeSecurityGroupEgress", "RevokeSecurityGroupIngress", "CreateNetworkInterface",
    "ModifyNetworkInterfaceAttribute", "DeleteNetworkInterface", "DeleteVolume", "ImportKeyPair", "DeleteKeyPair", "CreateTags",
    "DeleteTags",
)  # fmt: skip
ROLES = (
    "CreateRole", "GetRole", "TagRole", "DeleteRole", "PutRolePolicy", "GetRolePolicy", "DeleteRolePolicy", "AttachRolePolicy",
    "DetachRolePolicy", "ListAttachedRolePolicies", "ListRolePolicies", "PassRole",
)  # fmt: skip
PROFILES = (
    "CreateInstanceProfile", "GetInstanceProfile", "DeleteInstanceProfile", "AddRoleToInstanceProfile",
    "RemoveRoleFromInstanceProfile",
)  # fmt: skip
FUNCTIONS = (
    "CreateFunction", "GetFunction", "GetFunctionConfiguration", "UpdateFunctionConfiguration", "DeleteFunction",
    "InvokeFunction", "TagResource", "ListTags",
)  # fmt: skip
TABLES = (
    "CreateTable", "DescribeTable", "DeleteTable", "TagResource", "ListTagsOfResource", "GetItem", "PutItem", "UpdateItem",
    "Query",
)  # fmt: skip
LOGS = (
    "CreateLogGroup", "PutRetentionPolicy", "TagResource", "ListTagsForResource", "DeleteLogGroup", "PutMetricFilter",
    "DeleteMetricFilter",
)  # fmt: skip
ALARMS = ("PutMetricAlarm", "PutCompositeAlarm", "DeleteAlarms")
BOARDS = ("PutDashboard", "GetDashboard", "DeleteDashboards")
ZONES = (
    "CreateHostedZone", "GetHostedZone", "DeleteHostedZone", "GetChange", "ChangeTagsForResource", "ChangeResourceRecordSets",
    "ListResourceRecordSets", "ListQueryLoggingConfigs",
)  # fmt: skip
BUCKET = (
    "CreateBucket", "PutBucketVersioning", "GetBucketVersioning", "PutEncryptionConfiguration", "PutBucketPolicy", "ListBucket",
    "ListBucketVersions", "GetBucketLocation",
)  # fmt: skip
OBJECTS = ("GetObject", "GetObjectVersion", "PutObject", "DeleteObject", "DeleteObjectVersion")


def of_cluster(name: str, partition: str, region: str, account: str) -> Needed:
    """(actions, the resource that they are done to) for each group, of the cluster with this name."""
    here, iam = f"arn:{partition}:%s:{region}:{account}:%s", f"arn:{partition}:iam::{account}:%s/parallelcluster/{name}%s"
    for end in ("", "-x"):  # the stack and those inside it, whose names begin with its own
        yield _of("cloudformation", STACK), here % ("cloudformation", f"stack/{name}{end}/x")
    for end in ("/x", "-x"):
        yield _of("iam", ROLES), iam % ("role", end)
    yield _of("iam", PROFILES), iam % ("instance-profile", "/x")
    yield ("iam:GetPolicy",), f"arn:{partition}:iam::aws:policy/x"
    yield _of("ec2", MACHINES), "*"
    yield _of("lambda", FUNCTIONS), here % ("lambda", "function:pcluster-x")
    for table in ("", "slurm-"):
        yield _of("dynamodb", TABLES), here % ("dynamodb", f"table/parallelcluster-{table}{name}")
    for group in (f"/aws/parallelcluster/{name}-x", "/aws/lambda/pcluster-x"):
        yield _of("logs", LOGS), here % ("logs", f"log-group:{group}")
    yield _of("cloudwatch", ALARMS), here % ("cloudwatch", f"alarm:{name}-x")
    yield _of("cloudwatch", BOARDS), f"arn:{partition}:cloudwatch::{account}:dashboard/{name}-x"
    yield _of("route53", ZONES), "*"
    yield _of("s3", BUCKET), f"arn:{partition}:s3:::parallelcluster-x"
    yield _of("s3", OBJECTS), f"arn:{partition}:s3:::parallelcluster-x/x"
    yield ("s3:GetBucketTagging",), f"arn:{partition}:s3:::trainfleet-x"  # make clean looks whose they are


def _of(service: str, operations: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{service}:{operation}" for operation in operations)
