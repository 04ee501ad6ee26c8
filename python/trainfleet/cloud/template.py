"""The CloudFormation template of a fleet: a pure function of the config, the tables and the
account's facts.

Resources, by logical id: Node<slot> each node, made from Template in the group Together; Wall, its
security group; Vpc, PrivateSubnet, PublicSubnet, Nat: the network; FileSystem, Bucket, Log;
NodeRole; Head. What must not change while nodes live (another image would replace them all) is in
the stack's parameters: `read_back` gives them to an update.

Tested: every instance type and kind of capacity passes cfn-lint and our own rules (tests/oracles).
Not tested: no stack of it has been made in an account of AWS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Config
from ..trust.errors import ConfigError
from .instances import machines
from .template_inputs import Inputs, bucket_of, pairs, tags_of
from .template_parts import Resources, attribute, network, ref, roles, walls
from .template_storage import bucket, file_system, logs, makes_file_system

MOST_BYTES = 51_200  # of a template that is sent with the request (CloudFormation quotas)
UNTAGGED = {  # kinds that take no tags, or get theirs from elsewhere
    "AWS::EC2::Instance",
    "AWS::EC2::LaunchTemplate",
    "AWS::EC2::Route",
    "AWS::EC2::SubnetRouteTableAssociation",
    "AWS::EC2::VPCGatewayAttachment",
    "AWS::EC2::SecurityGroupIngress",
    "AWS::EC2::SecurityGroupEgress",
    "AWS::IAM::InstanceProfile",
    "AWS::S3::BucketPolicy",
    "AWS::Batch::ComputeEnvironment",
    "AWS::Batch::JobQueue",
}
FIXED = {
    "Image": "image",
    "HeadImage": "head_image",
    "Root": "root",
    "Zone": "zone",
    "Created": "created",
    "PublicKey": "public_key",
    "Owner": "owner",
    "Plain": "plain",
}


def render(config: Config, inputs: Inputs) -> str:
    """Renders the template as JSON. Raises ConfigError if it has more nodes than one template can
    hold.
    """
    text = json.dumps(template(config, inputs), separators=(",", ":"))
    if len(text) > MOST_BYTES:
        works = (
            f"{len(inputs.slots) - (len(text) - MOST_BYTES) // 200 - 1} is the most; for more "
            "nodes use slurm, batch or sagemaker"
        )
        raise ConfigError.of(
            "fleet.nodes", f"{len(inputs.slots)}: too many nodes for one template; {works}"
        )
    return text


def template(config: Config, inputs: Inputs) -> dict[str, Any]:
    """Returns the template as data."""
    made = resources(config, inputs, tags_of(config, inputs))
    about = f"trainfleet {config.fleet_name}: {len(inputs.slots)} x {config.fleet.instance_type}"
    return assemble(config, inputs, made, outputs(config, inputs, made), about)


def assemble(
    config: Config, inputs: Inputs, made: Resources, outputs: dict[str, Any], about: str
) -> dict[str, Any]:
    """Builds a template of these resources, each with our tags, and outputs; its parameters are
    those of FIXED that it names.
    """
    for entry in made.values():
        if entry["Type"] not in UNTAGGED:
            entry["Properties"]["Tags"] = pairs(tags_of(config, inputs))
    body = {"Resources": made, "Outputs": outputs}
    used = json.dumps(body)
    parameters = {
        name: {"Type": "String", "Default": getattr(inputs, field)}
        for name, field in FIXED.items()
        if f'{{"Ref": "{name}"}}' in used
    }
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": about,
        "Parameters": parameters,
        **body,
    }


def resources(config: Config, inputs: Inputs, tags: dict[str, str]) -> Resources:
    """Returns all resources; for a reduced stack only those that hold data, and their network."""
    kept = bucket(config, inputs) | file_system(config, inputs)
    if not inputs.kept or makes_file_system(config):
        kept |= network(config, inputs) | walls(config, inputs)
    if inputs.kept:
        return kept
    return kept | logs(config) | roles(config, inputs) | machines(config, inputs, tags)


def outputs(config: Config, inputs: Inputs, made: Resources) -> dict[str, Any]:
    """Returns the stack's outputs: names that are known only once it is made."""
    values: dict[str, Any] = {
        "BucketName": bucket_of(config, inputs),
        "Made": ref("Created"),
        "By": ref("Owner"),
        "In": ref("Zone"),
        "OneInterface": ref("Plain"),
    }
    if inputs.subnet or "PrivateSubnet" in made:
        values["Subnet"] = inputs.subnet or ref("PrivateSubnet")
    if "FileSystem" in made:
        values |= {
            "FileSystemId": ref("FileSystem"),
            "FileSystemDns": attribute("FileSystem", "DNSName"),
        }
        values |= {"FileSystemMount": attribute("FileSystem", "LustreMountName")}
    if "Log" in made:
        values |= {"LogGroup": ref("Log")}
    if "Head" in made:
        values |= {"HeadPublicAddress": ref("HeadAddress")}
    return {name: {"Value": value} for name, value in values.items()}


def read_back(inputs: Inputs, parameters: Mapping[str, str]) -> Inputs:
    """Returns the inputs with the values that the existing stack's parameters fix."""
    fixed: dict[str, Any] = {
        field: parameters[name] for name, field in FIXED.items() if name in parameters
    }
    if "Image" in parameters:
        # a stack from the time when both had one image
        fixed.setdefault("head_image", parameters["Image"])
    if inputs.plain == "no":  # there are several nodes now, which need the fabric
        fixed.pop("plain", None)
    return replace(inputs, **fixed)
