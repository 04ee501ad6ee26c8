"""The pretended account's IAM: what a request needs its caller to be allowed, and what CloudFormation does in the caller's name.

`account.may` answers: an evaluator that is not ours (oracles/iam_judge.py), with the policy of the caller. What CloudFormation does
for a resource is what its registry says of the type: `handlers` in the schemas that cfn-lint carries (read 2026-11-27). A schema
names what any property of a type needs; UNSET says which of it only a property that our templates do not set needs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import cfnlint

from .account import Account, Refused

SCHEMAS = Path(cfnlint.__file__).parent / "data/schemas/resources"
SERVICES = {
    "resourcegroupstaggingapi": "tag",
    "service-quotas": "servicequotas",
}  # as IAM calls them
NAMES = {  # what IAM calls an operation by another name, or checks as several
    "s3:ListBuckets": ["s3:ListAllMyBuckets"], "s3:HeadBucket": ["s3:ListBucket"], "s3:ListObjectVersions": ["s3:ListBucketVersions"],
    "s3:DeleteObjects": ["s3:DeleteObject", "s3:DeleteObjectVersion"], "s3:ListMultipartUploads": ["s3:ListBucketMultipartUploads"],
    "sts:GetCallerIdentity": [],  # which anybody may
}  # fmt: skip
TAGS = {  # by which a service that makes something with tags has them allowed
    "sagemaker": "sagemaker:AddTags", "batch": "batch:TagResource", "ec2": "ec2:CreateTags", "ssm": "ssm:AddTagsToResource",
    "ecr": "ecr:TagResource",
}  # fmt: skip
PLACES = {  # service → a parameter of its requests, and the ARN that it names; the first that a request has
    "s3": (("Bucket", "arn:aws:s3:::{}"),),
    "iam": (("InstanceProfileName", "arn:aws:iam::{account}:instance-profile/{}"), ("RoleName", "arn:aws:iam::{account}:role/{}"),
            ("PolicySourceArn", "{}")),
    "cloudformation": (("StackName", "arn:aws:cloudformation:{region}:{account}:stack/{}/x"),),
    "logs": (("logStreamName", "arn:aws:logs:{region}:{account}:log-group:{logGroupName}:log-stream:{}"),
             ("logGroupName", "arn:aws:logs:{region}:{account}:log-group:{}"), ("resourceArn", "{}")),
    "ecr": (("repositoryName", "arn:aws:ecr:{region}:{account}:repository/{}"), ("resourceArn", "{}")),
    "ssm": (("InstanceIds", "arn:aws:ec2:{region}:{account}:instance/{}"), ("Name", "arn:aws:ssm:{region}:{account}:parameter{}"),
            ("Path", "arn:aws:ssm:{region}:{account}:parameter{}/x")),
}  # fmt: skip
EVERYWHERE = (
    "iam:SimulatePrincipalPolicy",
    "logs:DescribeLogGroups",
)  # asked on no ARN that we know
OBJECTS = ("s3:DeleteObject", "s3:DeleteObjectVersion", "s3:AbortMultipartUpload")
EACH = {  # what CloudFormation's registry has no handlers for, by the API's own names
    "AWS::FSx::FileSystem": ["fsx:CreateFileSystem", "fsx:TagResource", "fsx:DescribeFileSystems", "fsx:DeleteFileSystem"],
    "AWS::CloudFormation::CustomResource": ["lambda:InvokeFunction"],
}  # fmt: skip
UNSET = {  # type → what only other properties, or an update, need
    "*": ["ssm:*", "s3tables:*", "vpc-lattice:*", "vpce:*", "eks:*", "firehose:*", "kinesis:*", "kms:*", "s3files:*",
          "elasticfilesystem:*", "*:UntagR*", "s3:REST.*", "batch:SetCapacityTags"],
    "AWS::Batch::*": ["iam:CreateServiceLinkedRole"],  # asked of the simulator by itself (permissions.denied)
    "AWS::CloudFormation::Stack": ["iam:PassRole"],  # to CloudFormation: no stack has a role of its own
    "AWS::CloudWatch::*": ["cloudwatch:*TagResource", "cloudwatch:ListTagsForResource"],  # no alarm has tags
    "AWS::DynamoDB::Table": [  # ParallelCluster's own policy for callers has none of these
        "dynamodb:*Import*", "dynamodb:*TimeToLive", "dynamodb:*Insights", "dynamodb:*Backups", "dynamodb:*Kinesis*",
        "dynamodb:UpdateTable", "dynamodb:*ResourcePolicy", "dynamodb:*Replica", "dynamodb:Scan", "dynamodb:*Write*",
        "dynamodb:DeleteItem", "iam:*", "logs:*", "s3:*",
    ],
    "AWS::EC2::EIP": ["ec2:AcceptAddressTransfer"],
    "AWS::EC2::Instance": [
        "ec2:*IamInstanceProfile*", "ec2:*tachVolume", "ec2:Modify*", "ec2:MonitorInstances", "ec2:StartInstances",
    ],
    "AWS::EC2::KeyPair": ["ec2:CreateKeyPair"],  # it is the user's own, imported
    "AWS::EC2::NetworkInterface": ["ec2:ModifyPublicIpDnsNameOptions"],
    "AWS::EC2::SubnetRouteTableAssociation": ["ec2:Replace*"],
    "AWS::EC2::VPC": ["ec2:CreateVpcEncryptionControl"],
    "AWS::EC2::VPCGatewayAttachment": ["ec2:*Vpn*"],
    "AWS::IAM::Policy": ["iam:*UserPolicy", "iam:*GroupPolicy"],  # they are policies of roles
    "AWS::Lambda::Function": ["lambda:*Config", "lambda:PutFunctionConcurrency", "lambda:GetLayerVersion", "lambda:PassCapacityProvider",
                              "lambda:AssociateRuntimeAlias"],
    "AWS::Logs::LogGroup": ["logs:*Policy", "logs:*Policies", "logs:CreateLogDelivery", "logs:PutBearer*"],
    "AWS::Route53::HostedZone": ["route53:*QueryLoggingConfig", "route53:UpdateHostedZoneFeatures", "route53:AssociateVPC*"],
    "AWS::S3::Bucket": [
        f"s3:*{what}*" for what in (
            "Metadata", "Acl", "Accelerate", "Analytics", "Abac", "CORS", "Logging", "Notification", "Lock", "Replication",
            "Versioning", "Website", "Tiering", "Inventory", "Metrics", "DeleteObject",
        )
    ] + ["s3:TagResource", "iam:PassRole"],
}  # fmt: skip
EMPTY = {"logs:*RetentionPolicy"}  # of what a pattern above takes too much


def needs(
    account: Account, service: str, operation: str, request: Mapping[str, Any]
) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Each action of a request, what it is done to, and the context keys that its service gives."""
    plain = f"{SERVICES.get(service, service)}:{operation}"
    for action in NAMES.get(plain, [plain]):
        where = place(account, service, request) if action not in EVERYWHERE else "*"
        yield action, f"{where}/x" if action in OBJECTS else where, {}
    if (
        any(
            name.lower() in ("tags", "tagspecifications") and tags for name, tags in request.items()
        )
        and service in TAGS
    ):
        yield TAGS[service], place(account, service, request), {}
    for key in ("RoleArn", "jobRoleArn", "executionRoleArn"):
        for role in found(key, request):
            to = "sagemaker.amazonaws.com" if service == "sagemaker" else "ecs-tasks.amazonaws.com"
            yield "iam:PassRole", role, {"iam:PassedToService": to}


def found(key: str, value: Any) -> Iterator[str]:
    """Every text under a key, however deep."""
    match value:
        case Mapping():
            yield from (
                text for name, text in value.items() if name == key and isinstance(text, str)
            )
            yield from (text for part in value.values() for text in found(key, part))
        case list() | tuple():
            yield from (text for part in value for text in found(key, part))


def place(account: Account, service: str, request: Mapping[str, Any]) -> str:
    for name, arn in PLACES.get(service, ()):
        if value := request.get(name):
            named = value[0] if isinstance(value, list) else value
            if str(named).startswith("arn:"):
                return str(named)
            return arn.format(
                named,
                region=account.region,
                account=account.number,
                **{k: v for k, v in request.items() if k == "logGroupName"},
            )
    return "*"


def admit(account: Account, service: str, operation: str, request: Mapping[str, Any]) -> None:
    """Refused where the caller may not send it."""
    for one in needs(account, service, operation, request):
        require(account, "UnauthorizedOperation" if service == "ec2" else "AccessDenied", *one)


def require(account: Account, code: str, action: str, where: str, context: dict[str, str]) -> None:
    if account.may and not account.may(action, where, context):
        who = f"arn:aws:sts::{account.number}:assumed-role/somebody/session"
        raise Refused(
            code, f"User: {who} is not authorized to perform: {action} on resource: {where}"
        )


@functools.cache
def handlers() -> dict[str, dict[str, list[str]]]:
    """type → create, update or delete → the actions by which CloudFormation does it."""
    made = dict[str, dict[str, list[str]]]()
    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        made[schema.get("typeName", "")] = {
            what: [
                f"{name.partition(':')[0].lower()}:{name.partition(':')[2]}"
                for name in said.get("permissions", ())
            ]
            for what, said in schema.get("handlers", {}).items()
        }
    return made | {
        kind: {"create": names[:-1], "delete": names[2:]} for kind, names in EACH.items()
    }


def done(kind: str, what: str) -> list[str]:
    """What CloudFormation does to create, update or delete a resource as our templates have it."""
    return sorted(
        {name for name in handlers().get(kind, {}).get(what, ()) if not is_unset(kind, name)}
    )


def is_unset(kind: str, action: str) -> bool:
    if any(fnmatchcase(action, name) for name in EMPTY):
        return False
    return any(
        fnmatchcase(kind, of) and fnmatchcase(action, name)
        for of, names in UNSET.items()
        for name in names
    )


def handle(
    account: Account, stack: str, kind: str, what: str, properties: Mapping[str, Any]
) -> None:
    """Refused where the caller may not do what CloudFormation does for a resource."""
    for action in done(kind, what) if account.may else ():
        context = (
            {"iam:AWSServiceName": "s3.data-source.lustre.fsx.amazonaws.com"}
            if action.endswith("LinkedRole")
            else {}
        )
        require(
            account,
            "AccessDenied",
            action,
            within(account, stack, kind, action, properties),
            context,
        )


def within(
    account: Account, stack: str, kind: str, action: str, properties: Mapping[str, Any]
) -> str:
    """What CloudFormation does it to."""
    service, _, operation = action.partition(":")
    iam = f"arn:aws:iam::{account.number}:"
    if service == "iam" and kind.startswith("AWS::FSx"):
        return f"{iam}role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/AWSServiceRoleForFSxS3Access_fs-01"
    if service == "iam":
        return f"{iam}{'instance-profile' if 'InstanceProfile' in operation else 'role'}/{stack}-Made-1"
    if service == "logs" and not operation.startswith("Describe"):
        return (
            f"arn:aws:logs:{account.region}:{account.number}:log-group:{properties['LogGroupName']}"
        )
    if service == "s3":
        name = (
            properties.get("BucketName")
            or properties.get("Bucket")
            or str(properties.get("DataRepositoryPath", "")).split("/")[2]
        )
        return f"arn:aws:s3:::{name}"
    return "*"
