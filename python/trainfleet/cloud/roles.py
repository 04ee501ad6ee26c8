"""Limits what nodes may do: speak to SSM, use the buckets that the config names, pull images, write
their log. Nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..config import Config
from ..storage import s3
from .repository import pulled
from .template_inputs import Inputs, bucket_of
from .vpc import Resource, Resources, attribute, ref, resource

READ = ["s3:GetObject"]
WRITE = [
    *READ,
    "s3:PutObject",
    "s3:DeleteObject",
    "s3:AbortMultipartUpload",
    "s3:ListMultipartUploadParts",
]
LIST = ["s3:ListBucket", "s3:GetBucketLocation"]
AGENT = "AmazonSSMManagedInstanceCore"  # AWS's own policy for machines with an SSM agent
PULL = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability"]


def written(config: Config, inputs: Inputs) -> set[str]:
    """The buckets that a run writes to."""
    addresses = (config.data.tokenized_path, config.checkpoint.path, config.fleet.shared_folder)
    # an engine's stack makes none
    own = {bucket_of(config, inputs)} if config.fleet.aws.bucket or not inputs.engine else set()
    return own | set(_buckets(addresses))


def only_read(config: Config, inputs: Inputs) -> set[str]:
    """The buckets that it only reads."""
    addresses = (
        config.fleet.fsx.s3_import,
        config.train.init_from,
        *(source.path for source in config.data.mixture),
    )
    return set(_buckets(addresses)) - written(config, inputs)


def _buckets(addresses: Iterable[str | None]) -> Iterator[str]:
    return (
        s3.split(address)[0] for address in addresses if address and address.startswith(s3.SCHEME)
    )


def roles(config: Config, inputs: Inputs) -> Resources:
    """The roles of nodes and head, each in its instance profile."""
    found = {
        "NodeRole": role(
            inputs,
            "ec2.amazonaws.com",
            [*statements(config, inputs), *pulls(config, inputs)],
            [AGENT],
        ),
        "NodeProfile": resource("AWS::IAM::InstanceProfile", Roles=[ref("NodeRole")]),
    }
    if config.fleet.aws.bastion_type:
        found["HeadRole"] = role(inputs, "ec2.amazonaws.com", (), [AGENT])
        found["HeadProfile"] = resource("AWS::IAM::InstanceProfile", Roles=[ref("HeadRole")])
    return found


def statements(config: Config, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Lists what ranks do by their role: data, checkpoints, logs."""
    for actions, buckets in ((WRITE, written(config, inputs)), (READ, only_read(config, inputs))):
        arns = [f"arn:{inputs.partition}:s3:::{name}" for name in sorted(buckets)]
        if arns:
            yield allow(LIST, arns)
            yield allow(actions, [f"{arn}/*" for arn in arns])
    yield allow(["logs:CreateLogStream", "logs:PutLogEvents"], [attribute("Log", "Arn")])


def pulls(config: Config, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Pulling the image, for a role whose holder pulls it itself."""
    if source := pulled(config, inputs):
        yield allow(["ecr:GetAuthorizationToken"], ["*"])  # which knows no narrower resource
        yield allow(PULL, [source])


def keys(config: Config, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Lists what the role of a training job does with fleet.sagemaker.kms_key. The key's policy
    must allow it too.

    The key may be an id, an alias, or the ARN of either: an alias is not a resource of a policy, so
    it is a condition. Source: the SageMaker API's OutputDataConfig and ResourceConfig, KmsKeyId
    (2026-11-23).
    """
    key = config.fleet.sagemaker.kms_key
    if key is None:
        return
    home = f"arn:{inputs.partition}:kms:{inputs.region}:{inputs.account}:"
    arn = (
        key
        if key.startswith("arn:")
        else home + (key if key.startswith("alias/") else f"key/{key}")
    )
    where, _, alias = arn.partition(":alias/")
    named = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": f"alias/{alias}"}} if alias else {}
    resources = [f"{where}:key/*" if alias else arn]
    yield allow(
        ["kms:DescribeKey", "kms:Encrypt", "kms:Decrypt", "kms:GenerateDataKey*"], resources, named
    )
    # for the nodes' disks
    yield allow(
        ["kms:CreateGrant"], resources, named | {"Bool": {"kms:GrantIsForAWSResource": "true"}}
    )


def allow(
    actions: list[str], resources: list[Any], conditions: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A statement of a policy."""
    statement = {"Effect": "Allow", "Action": actions, "Resource": resources}
    return statement | ({"Condition": conditions} if conditions else {})


def role(
    inputs: Inputs, service: str, allowed: Iterable[dict[str, Any]], managed: Iterable[str] = ()
) -> Resource:
    """Makes a role that this service may take, with its permissions and AWS's policies of these
    names.
    """
    trust = {"Effect": "Allow", "Action": ["sts:AssumeRole"], "Principal": {"Service": [service]}}
    made = resource(
        "AWS::IAM::Role", AssumeRolePolicyDocument={"Version": "2012-10-17", "Statement": [trust]}
    )
    if arns := [f"arn:{inputs.partition}:iam::aws:policy/{name}" for name in managed]:
        made["Properties"]["ManagedPolicyArns"] = arns
    if statements := list(allowed):
        policy = {"Version": "2012-10-17", "Statement": statements}
        made["Properties"]["Policies"] = [{"PolicyName": "run", "PolicyDocument": policy}]
    return made
