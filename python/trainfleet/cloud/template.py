"""Makes the CloudFormation template of a fleet from the config and the account's facts.

Resources by logical id: Node<slot>, the nodes, from the launch template Template in the group
Together; Wall, their security group; Vpc, PrivateSubnet, PublicSubnet, Nat: the network;
FileSystem, Bucket, Log; NodeRole; Head. Values that must not change while nodes live, because a new
value would replace them, are parameters of the stack: `read_back` passes them to an update.

Tested: every instance type and kind of capacity passes cfn-lint and our own rules (tests/oracles).
Not tested: no stack of it has been made in an account of AWS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from ..config import Config
from ..trust.errors import ConfigError
from .calls import Json
from .instances import machines
from .template_inputs import TEMPLATE_TYPES, Inputs, bucket_of, pairs, tags_of
from .template_parts import Resources, attribute, fixed, network, ref, roles, walls
from .template_storage import bucket, file_system, logs, makes_file_system

MOST_BYTES = 51_200  # of a template in a request. Source: CloudFormation quotas
UNTAGGED = {kind for kind, row in TEMPLATE_TYPES.items() if not row.get("tagged", True)}
# the stack's parameters, and the fields of Inputs with their values
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
    """Renders the template as JSON. Raises ConfigError if it is too large for CloudFormation."""
    text = json.dumps(template(config, inputs), separators=(",", ":"))
    if len(text) > MOST_BYTES:
        most = len(inputs.slots) - (len(text) - MOST_BYTES) // 200 - 1
        works = f"{most} is the most; for more nodes use slurm, batch or sagemaker"
        what = f"{len(inputs.slots)}: too many nodes for one template; {works}"
        raise ConfigError.of("fleet.nodes", what)
    return text


def template(config: Config, inputs: Inputs) -> Json:
    """Returns the template as data."""
    made = resources(config, inputs, tags_of(config, inputs))
    about = f"trainfleet {config.fleet_name}: {len(inputs.slots)} x {config.fleet.instance_type}"
    return assemble(config, inputs, made, outputs(config, inputs, made), about)


def assemble(config: Config, inputs: Inputs, made: Resources, outputs: Json, about: str) -> Json:
    """Returns a template with these resources, our tags and the outputs. Its parameters are the
    entries of FIXED that the resources or outputs reference.
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
    """Returns all resources. With `inputs.kept`, returns only those that hold data, and their
    network.
    """
    kept = bucket(config, inputs) | file_system(config, inputs)
    if not inputs.kept or makes_file_system(config):
        kept |= network(config, inputs) | walls(config, inputs)
    if inputs.kept:
        return kept
    return kept | logs(config) | roles(config, inputs) | machines(config, inputs, tags)


def outputs(config: Config, inputs: Inputs, made: Resources) -> Json:
    """Returns the stack's outputs: names and addresses that exist only after creation."""
    values: Json = {
        "BucketName": bucket_of(config, inputs),
        **fixed("outputs"),
    }
    if inputs.subnet or "PrivateSubnet" in made:
        values["Subnet"] = inputs.subnet or ref("PrivateSubnet")
    if "FileSystem" in made:
        values["FileSystemId"] = ref("FileSystem")
        values["FileSystemDns"] = attribute("FileSystem", "DNSName")
        values["FileSystemMount"] = attribute("FileSystem", "LustreMountName")
    if "Log" in made:
        values["LogGroup"] = ref("Log")
    if "Head" in made:
        values["HeadPublicAddress"] = ref("HeadAddress")
    return {name: {"Value": value} for name, value in values.items()}


def read_back(inputs: Inputs, parameters: Mapping[str, str]) -> Inputs:
    """Returns the inputs with the values of the existing stack's parameters."""
    fixed: Json = {field: parameters[name] for name, field in FIXED.items() if name in parameters}
    if "Image" in parameters:
        # In older stacks, nodes and head have the same image.
        fixed.setdefault("head_image", parameters["Image"])
    if inputs.plain == "no":  # several nodes need EFA
        fixed.pop("plain", None)
    return replace(inputs, **fixed)
