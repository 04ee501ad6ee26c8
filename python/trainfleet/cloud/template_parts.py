"""Builds the template's network, security groups and roles.

The network is the user's, or a VPC with a public and a private subnet in one zone. Roles allow
access only to SSM, and to the config's buckets, images and log group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.tables import read_table
from ..storage import s3
from .calls import Json
from .repository import pulled
from .template_inputs import Inputs, bucket_of

Resource = Json
Resources = dict[str, Resource]

ANYWHERE = "0.0.0.0/0"
AGENT = "AmazonSSMManagedInstanceCore"  # AWS's managed policy for machines with an SSM agent
RESOURCES: dict[str, Resources] = read_table(Path(__file__).with_name("template_resources.yaml"))
ROLE_ACTIONS: dict[str, list[str]] = read_table(Path(__file__).with_name("role_actions.yaml"))


def ref(name: str) -> dict[str, str]:
    return {"Ref": name}


def attribute(name: str, of: str) -> dict[str, list[str]]:
    return {"Fn::GetAtt": [name, of]}


def resource(kind: str, **properties: Any) -> Resource:
    return {"Type": kind, "Properties": properties}


def vpc(config: Config) -> Any:
    """Returns the VPC's ID, or a reference to the stack's VPC."""
    return config.fleet.aws.vpc or ref("Vpc")


def subnet(inputs: Inputs) -> Any:
    """Returns the nodes' subnet ID, or a reference to the stack's private subnet."""
    return inputs.subnet or ref("PrivateSubnet")


def fixed(name: str, **values: Any) -> Json:
    """Returns an entry of template_resources.yaml, filled with `values` (see `fill`)."""
    found: Json = fill(RESOURCES[name], **values)
    return found


def fill(form: Any, **values: Any) -> Any:
    """Replaces the uppercase placeholders in a form with `values`.

    A string replaces its placeholder anywhere within a string. Any other value replaces the whole
    string. Keys with null values are dropped, and so are objects that become empty as a result.
    """

    def put(match: re.Match[str]) -> str:
        value = json.dumps(values[match[0].strip('"')])
        return value if match[0].startswith('"') else value[1:-1]

    # in one pass, because a value may contain another placeholder
    words = "|".join(f'"{word}"|{word}' for word in values) or "$^"
    return json.loads(re.sub(words, put, json.dumps(form)), object_pairs_hook=_present) or {}


def _present(pairs: list[tuple[str, Any]]) -> Json | None:
    found = {key: value for key, value in pairs if value is not None}
    return found if found or not pairs else None


def network(config: Config, inputs: Inputs) -> Resources:
    """Builds the network, or {} if the config names a VPC.

    If the stack only keeps data, the network has no NAT gateway, because that costs money.
    """
    if config.fleet.aws.vpc:
        return {}
    private = fixed("private", REGION=inputs.region)
    return private if inputs.kept else private | fixed("way out")


def walls(config: Config, inputs: Inputs) -> Resources:
    """Creates the security groups and the rules that allow SSH."""
    aws, title = config.fleet.aws, f"trainfleet {config.fleet_name}"
    found, outer = fixed("walls", TITLE=title), "Wall"
    if aws.bastion_type and not inputs.kept:
        found, outer = found | fixed("head wall", TITLE=title), "HeadWall"
    for number, addresses in enumerate(() if inputs.kept else aws.allow_ssh_from):
        found |= fixed("ssh", NUMBER=str(number), GROUP=outer, ADDRESSES=addresses)
    for name in {"Wall", outer}:
        found[name]["Properties"]["VpcId"] = vpc(config)
    return found


def written(config: Config, inputs: Inputs) -> set[str]:
    """Returns the buckets that a run writes to."""
    addresses = (config.data.tokenized_path, config.checkpoint.path, config.fleet.shared_folder)
    # A scheduler's stack has no bucket.
    own = {bucket_of(config, inputs)} if config.fleet.aws.bucket or not inputs.scheduler else set()
    return own | set(_buckets(addresses))


def only_read(config: Config, inputs: Inputs) -> set[str]:
    """Returns the buckets that a run only reads."""
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
    """Builds the roles and instance profiles for the nodes and the head."""
    allowed = [*statements(config, inputs), *pulls(config, inputs)]
    found = {
        "NodeRole": role(inputs, "ec2.amazonaws.com", allowed, [AGENT]),
        "NodeProfile": resource("AWS::IAM::InstanceProfile", Roles=[ref("NodeRole")]),
    }
    if config.fleet.aws.bastion_type:
        found["HeadRole"] = role(inputs, "ec2.amazonaws.com", (), [AGENT])
        found["HeadProfile"] = resource("AWS::IAM::InstanceProfile", Roles=[ref("HeadRole")])
    return found


def statements(config: Config, inputs: Inputs) -> Iterator[Json]:
    """Yields the policy statements that ranks need for data, checkpoints and logs."""
    for access, buckets in (
        ("write", written(config, inputs)),
        ("read", only_read(config, inputs)),
    ):
        arns = [f"arn:{inputs.partition}:s3:::{name}" for name in sorted(buckets)]
        if arns:
            yield allow("list", arns)
            yield allow(access, [f"{arn}/*" for arn in arns])
    yield allow("log", [attribute("Log", "Arn")])


def pulls(config: Config, inputs: Inputs) -> Iterator[Json]:
    """Yields the policy statements for pulling the config's image, if it is in ECR."""
    if source := pulled(config, inputs):
        yield allow("login", ["*"])
        yield allow("pull", [source])


def keys(config: Config, inputs: Inputs) -> Iterator[Json]:
    """Yields the policy statements that allow a training job to use fleet.sagemaker.kms_key. The
    key's policy must allow the same actions.

    The config may specify the key by ID, by alias, or by the ARN of either. A policy's resource
    can't be an alias, so the statement has a condition instead. Source: the SageMaker API's
    OutputDataConfig and ResourceConfig, KmsKeyId (2026-11-23).
    """
    key = config.fleet.sagemaker.kms_key
    if key is None:
        return
    home = f"arn:{inputs.partition}:kms:{inputs.region}:{inputs.account}:"
    arn = key
    if not key.startswith("arn:"):
        arn = home + (key if key.startswith("alias/") else f"key/{key}")
    where, _, alias = arn.partition(":alias/")
    named = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": f"alias/{alias}"}} if alias else {}
    resources = [f"{where}:key/*" if alias else arn]
    yield allow("use key", resources, named)
    by_aws = {"Bool": {"kms:GrantIsForAWSResource": "true"}}
    yield allow("grant key", resources, named | by_aws)


def allow(access: str, resources: list[Any], conditions: Json | None = None) -> Json:
    """Returns a policy statement that allows the actions under `access` in role_actions.yaml."""
    return statement(ROLE_ACTIONS[access], resources, conditions)


def statement(actions: list[str], resources: list[Any], conditions: Json | None = None) -> Json:
    """Returns a policy statement that allows the actions."""
    allowed = {"Effect": "Allow", "Action": actions, "Resource": resources}
    return allowed | ({"Condition": conditions} if conditions else {})


def role(
    inputs: Inputs, service: str, allowed: Iterable[Json], managed: Iterable[str] = ()
) -> Resource:
    """Builds a role that `service` can assume. `managed`: names of AWS managed policies."""
    made = fixed("role", SERVICE=service)
    if arns := [f"arn:{inputs.partition}:iam::aws:policy/{name}" for name in managed]:
        made["Properties"]["ManagedPolicyArns"] = arns
    if statements := list(allowed):
        made["Properties"]["Policies"] = [fixed("policy", STATEMENTS=statements)]
    return made
