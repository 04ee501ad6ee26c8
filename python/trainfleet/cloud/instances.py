"""The machines: a launch template with every EFA interface, an instance a node made from it, the
placement group, the head node.

Each node is a separate AWS::EC2::Instance, `Node<slot>`: a stack update with other slots makes and
removes single nodes, and leaves those whose slots stay as they are. CreateFleet could take what is
free of several types, and an Auto Scaling group would replace nodes at once; but a job needs one
type, all its nodes or none, and replaces a node only when the watch has judged it.
"""

from __future__ import annotations

import base64
from typing import Any

from ..config import Config
from ..process.install_paths import ROOT
from .instance_networking import PLAIN, interfaces
from .template_inputs import Inputs, pairs
from .template_storage import makes_file_system
from .vpc import Resource, Resources, after, attribute, ref, resource, subnet

SCRIPTS = ROOT / "scripts"
PAIR = "KeyPair"
HEAD_GIB = 100
NODE = "Node"  # a node's logical id begins so


def capacity_of(config: Config) -> str:
    """Returns how nodes are bought: fleet.spot means the same as fleet.aws.capacity spot."""
    aws = config.fleet.aws
    return "spot" if config.fleet.spot and aws.capacity == "on-demand" else aws.capacity


def machines(config: Config, inputs: Inputs, tags: dict[str, str]) -> Resources:
    """Everything that computes, and how it is placed and opened."""
    found = {} if inputs.plain == "yes" else together(config)
    if not config.fleet.aws.key_pair and inputs.public_key:
        # Its time keeps it from meeting one that an earlier stack left.
        name = f"trainfleet-{config.fleet_name}-{inputs.created}"[:255]
        found[PAIR] = resource(
            "AWS::EC2::KeyPair", KeyName=name, PublicKeyMaterial=ref("PublicKey")
        )
    found["Template"] = _template(_node_data(config, inputs, tags), tags)
    if makes_file_system(config):  # takes ten minutes, in which no node is to be paid for
        found["Template"]["DependsOn"] = "FileSystem"
    found |= {f"{NODE}{slot}": _node(config, slot) for slot in inputs.slots}
    return found | (_head(config, inputs, tags) if config.fleet.aws.bastion_type else {})


def together(config: Config) -> Resources:
    """The placement group that is made; reserved machines are where their reservation says."""
    is_made = capacity_of(config) in ("on-demand", "spot")
    return {"Together": resource("AWS::EC2::PlacementGroup", Strategy="cluster")} if is_made else {}


def placement(config: Config, inputs: Inputs) -> Any:
    """The placement group of the nodes: the reservation's own, the one that is made, or None."""
    return inputs.group or (ref("Together") if together(config) and inputs.plain == "no" else None)


def _node(config: Config, slot: int) -> Resource:
    name = pairs({"Name": f"{config.fleet_name}-{slot}"})
    return resource("AWS::EC2::Instance", LaunchTemplate=newest("Template"), Tags=name)


def _node_data(config: Config, inputs: Inputs, tags: dict[str, str]) -> dict[str, Any]:
    fleet, capacity = config.fleet, capacity_of(config)
    data = _common(config, inputs, tags, fleet.instance_type or "", fleet.aws.volume_gib, "Node")
    data["NetworkInterfaces"] = [
        {
            "NetworkCardIndex": interface.card,
            "DeviceIndex": interface.device,
            "InterfaceType": interface.kind,
            "SubnetId": subnet(inputs),
            "Groups": [attribute("Wall", "GroupId")],
            "DeleteOnTermination": True,
        }
        for interface in (PLAIN if inputs.plain == "yes" else interfaces(fleet.instance_type or ""))
    ]
    data["UserData"] = base64.b64encode(user_data(config).encode()).decode()
    # A spot instance and one in a capacity block can't stop themselves: shutting down ends
    # them.
    data["InstanceInitiatedShutdownBehavior"] = (
        "stop" if capacity in ("on-demand", "reservation") else "terminate"
    )
    if group := placement(config, inputs):
        data["Placement"] = {"GroupName": group}
    if capacity == "spot":
        once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        data["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": once}
    return data | reserved(config)


def reserved(config: Config) -> dict[str, Any]:
    """Of a launch template: the reservation, or the capacity block, from which its instances are
    taken; empty without one.
    """
    capacity, data = capacity_of(config), dict[str, Any]()
    if capacity == "block":
        data["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    if config.fleet.aws.reservation and capacity in ("reservation", "block"):
        target = {"CapacityReservationId": config.fleet.aws.reservation}
        data["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    return data


def _common(
    config: Config, inputs: Inputs, tags: dict[str, str], kind: str, volume: int, part: str
) -> dict[str, Any]:
    """Returns what nodes and head have in common; `part`: Node or Head."""
    data = {
        "ImageId": ref("HeadImage" if part == "Head" else "Image"),
        "InstanceType": kind,
        "IamInstanceProfile": {"Arn": attribute(f"{part}Profile", "Arn")},
        **hardened(ref("Root"), volume, tags),
    }
    if config.fleet.aws.key_pair or inputs.public_key:
        data["KeyName"] = config.fleet.aws.key_pair or ref(PAIR)
    return data


def hardened(root: Any, volume: int, tags: dict[str, str]) -> dict[str, Any]:
    """Of any launch template: tokens for the metadata service, an encrypted volume, tags on all
    that an instance brings.
    """
    disk = {
        "VolumeSize": volume,
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    # 2: containers
    return {
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "HttpPutResponseHopLimit": 2,
        },
        "BlockDeviceMappings": [{"DeviceName": root, "Ebs": disk}],
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": pairs(tags)}
            for kind in ("instance", "volume", "network-interface")
        ],
    }


def newest(template: str) -> dict[str, Any]:
    """A launch template of the stack, in its newest version."""
    return {
        "LaunchTemplateId": ref(template),
        "Version": attribute(template, "LatestVersionNumber"),
    }


def _template(data: dict[str, Any], tags: dict[str, str]) -> Resource:
    own = {"ResourceType": "launch-template", "Tags": pairs(tags)}
    return resource("AWS::EC2::LaunchTemplate", LaunchTemplateData=data, TagSpecifications=[own])


def _head(config: Config, inputs: Inputs, tags: dict[str, str]) -> Resources:
    """Makes a small machine in the public subnet, with a public address, through which SSH reaches
    the nodes.
    """
    data = _common(config, inputs, tags, config.fleet.aws.bastion_type or "", HEAD_GIB, "Head")
    data["NetworkInterfaces"] = [
        {
            "DeviceIndex": 0,
            "SubnetId": ref("PublicSubnet"),
            "Groups": [attribute("HeadWall", "GroupId")],
            "DeleteOnTermination": True,
        }
    ]
    head = resource(
        "AWS::EC2::Instance",
        LaunchTemplate=newest("HeadTemplate"),
        Tags=pairs({"Name": f"{config.fleet_name}-head"}),
    )
    return {
        "HeadTemplate": _template(data, tags),
        "Head": after("PublicWay", head),
        "HeadAddress": after(
            "GatewayOfVpc", resource("AWS::EC2::EIP", Domain="vpc", InstanceId=ref("Head"))
        ),
    }


def user_data(config: Config) -> str:
    """Writes a node's first boot: it sets its dead man's timer. `make setup` does the rest, as it
    can look and try again.
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
