"""Builds a fleet's CloudFormation template from the config and account details.

Resources by logical ID: Node<slot>, the nodes, from the launch template Template in the placement
group Together; Wall, their security group; Vpc, PrivateSubnet, PublicSubnet, Nat: the network;
FileSystem, Bucket, Log; NodeRole; Head. Values that must stay the same while nodes exist, because a
change would replace the nodes, are stack parameters. `read_back` passes them to an update.

Each node is a separate AWS::EC2::Instance, so a stack update can add or remove single nodes without
changing the others. CreateFleet may mix instance types, and an Auto Scaling group replaces nodes
immediately. But a job requires a single type, and replaces a node only after a verdict.

Tested: every instance type and kind of capacity passes cfn-lint and our own rules (tests/oracles).
Not tested: creating this stack in an AWS account.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.tables import read_table
from ..hardware import node_types
from ..process.install_paths import ROOT
from ..trust.errors import ConfigError
from .calls import Json
from .template_inputs import TEMPLATE_TYPES, Inputs, Tags, bucket_of, pairs, tags_of
from .template_parts import (
    Resource,
    Resources,
    attribute,
    fixed,
    network,
    ref,
    resource,
    roles,
    subnet,
    walls,
)
from .template_storage import bucket, file_system, has_file_system, logs, makes_file_system

MOST_BYTES = 51_200  # maximum size of a template in a request. Source: CloudFormation quotas
UNTAGGED = {kind for kind, row in TEMPLATE_TYPES.items() if not row.get("tagged", True)}
# stack parameters, and the fields of Inputs that contain their values
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
    """Returns the template as a dict."""
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


def resources(config: Config, inputs: Inputs, tags: Tags) -> Resources:
    """Returns all resources or, if `inputs.kept` is set, only those that hold data, and their
    network.
    """
    kept = bucket(config, inputs) | file_system(config, inputs)
    if not inputs.kept or makes_file_system(config):
        kept |= network(config, inputs) | walls(config, inputs)
    if inputs.kept:
        return kept
    return kept | logs(config) | roles(config, inputs) | machines(config, inputs, tags)


def outputs(config: Config, inputs: Inputs, made: Resources) -> Json:
    """Returns the stack's outputs: names and addresses that are known only after creation."""
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
        # in stacks from older versions, the nodes and the head have the same image
        fixed.setdefault("head_image", parameters["Image"])
    if inputs.plain == "no":  # several nodes need EFA
        fixed.pop("plain", None)
    return replace(inputs, **fixed)


@dataclass(frozen=True)
class Interface:
    """A network interface in a launch template. `kind`: interface (no EFA), efa (EFA and an IP
    address), or efa-only (no IP address).
    """

    card: int
    device: int
    kind: str


PLAIN = (Interface(0, 0, "interface"),)  # the interface of a single node


def interfaces(name: str, tasks: int = 0) -> tuple[Interface, ...]:
    """Returns the interfaces that provide all of a node's EFA devices, the primary one first.

    `tasks`: interfaces that are attached to card 0 later, for example by ECS for a container. If
    the card has no slots for them, the primary interface has both EFA and the IP address, as in
    AWS's template for P5 on Batch.
    """
    row = node_types.INSTANCE_TYPES[name]
    if row.efa_only and row.first_efa == 0 and 2 + tasks > row.slots:
        return (
            Interface(0, 0, "efa"),
            *(Interface(card, 0, "efa-only") for card in range(1, row.efa)),
        )
    if not row.efa_only:
        return (
            Interface(0, 0, "efa" if row.efa else "interface"),
            *(Interface(card, 1, "efa") for card in range(1, row.efa)),
        )
    # The primary interface is device 0 of card 0, so EFA on that card is device 1.
    cards = range(row.first_efa, row.first_efa + row.efa)
    return (
        Interface(0, 0, "interface"),
        *(Interface(card, 0 if card else 1, "efa-only") for card in cards),
    )


def addresses(name: str) -> int:
    """Returns the number of subnet addresses that a node uses."""
    return sum(interface.kind != "efa-only" for interface in interfaces(name))


@dataclass(frozen=True)
class Quota:
    """A quota's code and name in Service Quotas."""

    code: str
    name: str


QUOTAS = {
    group: {key: Quota(**row) for key, row in rows.items()}
    for group, rows in read_table(Path(__file__).with_name("quotas.yaml")).items()
}


def quota_of(name: str, capacity: str) -> Quota | None:
    """Returns the vCPU quota that running nodes of a type count against.

    Returns None if the quota's code is unknown, and for a capacity block, which counts against a
    separate quota when it is bought.
    """
    row = node_types.INSTANCE_TYPES[name]
    if capacity == "block":
        return None
    if capacity == "spot":
        return QUOTAS["spot"].get(row.spot_quota)
    return QUOTAS["on-demand"][row.quota]


SCRIPTS = ROOT / "scripts"
PAIR = "KeyPair"
HEAD_GIB = 100  # the head's disk, in GiB
NODE = "Node"  # prefix of a node's logical ID
# logical ID and type of the machine that builds the Python environment before the nodes exist
BUILDER, BUILDER_TYPE, BUILDER_VCPUS = "Builder", "c7i.xlarge", 4


def capacity_of(config: Config) -> str:
    """Returns the kind of capacity. fleet.spot is equivalent to `fleet.aws.capacity: spot`."""
    aws = config.fleet.aws
    return "spot" if config.fleet.spot and aws.capacity == "on-demand" else aws.capacity


def machines(config: Config, inputs: Inputs, tags: Tags) -> Resources:
    """Builds the nodes and the head, with launch templates, placement group and key pair."""
    found = {} if inputs.plain == "yes" else together(config)
    if not config.fleet.aws.key_pair and inputs.public_key:
        # The time makes the name unique, because an earlier stack may have left a key pair.
        name = f"trainfleet-{config.fleet_name}-{inputs.created}"[:255]
        found[PAIR] = resource(
            "AWS::EC2::KeyPair", KeyName=name, PublicKeyMaterial=ref("PublicKey")
        )
    found["Template"] = _template(_node_data(config, inputs, tags), tags)
    # creating it takes ten minutes, during which nodes would cost money
    if makes_file_system(config):
        found["Template"]["DependsOn"] = "FileSystem"
    found |= {f"{NODE}{slot}": _node(config, slot) for slot in inputs.slots}
    found |= _builder(config, inputs, tags) if inputs.builds else {}
    return found | (_head(config, inputs, tags) if config.fleet.aws.bastion_type else {})


def builds_first(config: Config) -> bool:
    """Returns whether a cheap machine builds the Python environment before the nodes exist. This
    requires a file system that outlives the machine, and saves money only if nodes have
    accelerators.
    """
    row = node_types.instance(config.fleet.instance_type)
    return bool(row and row.accelerator and has_file_system(config) and not config.fleet.python)


def _builder(config: Config, inputs: Inputs, tags: Tags) -> Resources:
    """Defines the machine that builds the Python environment. It boots the nodes' image, because
    the environment must match their Python.
    """
    aws = replace(config.fleet.aws, capacity="on-demand", reservation=None)
    fleet = replace(config.fleet, instance_type=BUILDER_TYPE, spot=False, aws=aws)
    own = replace(config, fleet=fleet)
    data = _node_data(own, replace(inputs, plain="yes", group=None), tags)
    return {"BuilderTemplate": _template(data, tags)} | fixed("builder", FLEET=config.fleet_name)


def together(config: Config) -> Resources:
    """Builds the placement group. Returns {} for reserved machines, which the reservation
    places.
    """
    is_made = capacity_of(config) in ("on-demand", "spot")
    return {"Together": resource("AWS::EC2::PlacementGroup", Strategy="cluster")} if is_made else {}


def placement(config: Config, inputs: Inputs) -> Any:
    """Returns the nodes' placement group (the reservation's or the stack's), or None."""
    return inputs.group or (ref("Together") if together(config) and inputs.plain == "no" else None)


def _node(config: Config, slot: int) -> Resource:
    return fixed("node", NAME=f"{config.fleet_name}-{slot}")


def _node_data(config: Config, inputs: Inputs, tags: Tags) -> Json:
    fleet, capacity = config.fleet, capacity_of(config)
    data = _common(config, inputs, tags, fleet.instance_type or "", fleet.aws.volume_gib, "Node")
    cards = PLAIN if inputs.plain == "yes" else interfaces(fleet.instance_type or "")
    data |= fixed(
        "node data",
        INTERFACES=attached(cards, SubnetId=subnet(inputs)),
        SCRIPT=base64.b64encode(user_data(config).encode()).decode(),
        ENDING="stop" if capacity in ("on-demand", "reservation") else "terminate",
        GROUP=placement(config, inputs),
    )
    if capacity == "spot":
        data["InstanceMarketOptions"] = fixed("spot")
    return data | reserved(config)


def attached(cards: Iterable[Interface], **more: Any) -> list[Json]:
    """Returns launch template entries for these interfaces, with the nodes' security group."""
    return [
        {
            "NetworkCardIndex": card.card,
            "DeviceIndex": card.device,
            "InterfaceType": card.kind,
            **more,
            "Groups": [attribute("Wall", "GroupId")],
            "DeleteOnTermination": True,
        }
        for card in cards
    ]


def reserved(config: Config) -> Json:
    """Returns the launch template keys for a reservation or capacity block, or {} without one."""
    capacity = capacity_of(config)
    if capacity not in ("reservation", "block"):
        return {}
    market = "capacity-block" if capacity == "block" else None
    return fixed("reservation", MARKET=market, RESERVED=config.fleet.aws.reservation or None)


def _common(config: Config, inputs: Inputs, tags: Tags, kind: str, volume: int, part: str) -> Json:
    """Returns the launch template data that nodes and head share. `part`: Node or Head."""
    image = "HeadImage" if part == "Head" else "Image"
    data = fixed("machine", IMAGE=image, KIND=kind, PROFILE=f"{part}Profile")
    data |= hardened(ref("Root"), volume, tags)
    if config.fleet.aws.key_pair or inputs.public_key:
        data["KeyName"] = config.fleet.aws.key_pair or ref(PAIR)
    return data


def hardened(root: Any, volume: int, tags: Tags) -> Json:
    """Returns the security settings and tags that all launch templates share."""
    return fixed("hardened", ROOT=root, SIZE=volume, TAGS=pairs(tags))


def _template(data: Json, tags: Tags) -> Resource:
    return fixed("template", TAGS=pairs(tags), DATA=data)


def _head(config: Config, inputs: Inputs, tags: Tags) -> Resources:
    """Builds the head: a machine with a public address, through which SSH reaches the nodes."""
    data = _common(config, inputs, tags, config.fleet.aws.bastion_type or "", HEAD_GIB, "Head")
    data |= fixed("public")
    return {"HeadTemplate": _template(data, tags)} | fixed("head", FLEET=config.fleet_name)


def user_data(config: Config) -> str:
    """Returns a node's first-boot script, which only starts the dead man's timer.

    `make setup` does the rest, because it can check and retry each step.
    """
    fleet = config.fleet
    hours = "-" if fleet.max_lifetime_hours is None else f"{fleet.max_lifetime_hours:g}"
    minutes = "-" if fleet.idle_minutes is None else f"{fleet.idle_minutes}"
    script = (SCRIPTS / "deadman.sh").read_text(encoding="utf-8").rstrip("\n")
    return "\n".join(
        [
            "#!/bin/bash",
            "cat > /root/deadman.sh << 'TRAINFLEET'",
            script,
            "TRAINFLEET",
            f"bash /root/deadman.sh apply {hours} {minutes}",
            "",
        ]
    )
