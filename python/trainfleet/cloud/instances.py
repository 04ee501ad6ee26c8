"""The machines: a launch template with every EFA interface, an instance per node made from it, the
placement group and the head node; and the quotas that nodes count against.

Each node is a separate AWS::EC2::Instance, `Node<slot>`: a stack update with other slots makes and
removes single nodes, and does not change the others. CreateFleet could mix several types that are
available, and an Auto Scaling group would replace nodes at once; but a job needs one
type, all its nodes or none, and replaces a node only when the watch has judged it.

The figures of each type: instance_types.json. Quota codes: Service Quotas' list for EC2, as
public copies show it (read 2026-11-22).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..hardware import node_types
from ..process.install_paths import ROOT
from .template_inputs import Inputs, pairs
from .template_parts import Resource, Resources, after, attribute, ref, resource, subnet
from .template_storage import makes_file_system


@dataclass(frozen=True)
class Interface:
    """A network interface with its numbers in a launch template; `kind`: interface (plain), efa
    (with an address), efa-only.
    """

    card: int
    device: int
    kind: str


PLAIN = (Interface(0, 0, "interface"),)  # interfaces of a single node


def interfaces(name: str, tasks: int = 0) -> tuple[Interface, ...]:
    """Returns the interfaces that give a node all its EFA devices, the primary first.

    `tasks`: interfaces that are attached to card 0 later, as ECS does for a container. If the
    card can't hold them next to two others, one has both the address and EFA, like in AWS's own
    template for P5 on Batch.
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
    # after the primary on card 0: the first device of every other card
    cards = range(row.first_efa, row.first_efa + row.efa)
    return (
        Interface(0, 0, "interface"),
        *(Interface(card, 0 if card else 1, "efa-only") for card in cards),
    )


def addresses(name: str) -> int:
    """Returns how many of its subnet's addresses a node takes; an interface with only EFA takes
    none.
    """
    return sum(interface.kind != "efa-only" for interface in interfaces(name))


@dataclass(frozen=True)
class Quota:
    """A quota on running vCPUs: its code and name in Service Quotas."""

    code: str
    name: str


ON_DEMAND = {
    "trn": Quota("L-2C3B7624", "Running On-Demand Trn instances"),
    "p": Quota("L-417A185B", "Running On-Demand P instances"),
    "g": Quota("L-DB2E81BA", "Running On-Demand G and VT instances"),
    "c": Quota("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
}
SPOT = {
    "trn": Quota("L-6B0D517C", "All Trn Spot Instance Requests"),
    "p5": Quota("L-C4BD4855", "All P5 Spot Instance Requests"),
    "p": Quota("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    "g": Quota("L-3819A6DF", "All G and VT Spot Instance Requests"),
    "c": Quota("L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
}


def quota_of(name: str, capacity: str) -> Quota | None:
    """Returns the quota that such running nodes count against.

    None in a capacity block, which has a separate one when it is bought, and if AWS has not
    published the quota's code.
    """
    row = node_types.INSTANCE_TYPES[name]
    if capacity == "block":
        return None
    return SPOT.get(row.spot_quota) if capacity == "spot" else ON_DEMAND[row.quota]


SCRIPTS = ROOT / "scripts"
PAIR = "KeyPair"
HEAD_GIB = 100
NODE = "Node"  # the beginning of a node's logical id


def capacity_of(config: Config) -> str:
    """Returns how nodes are bought: fleet.spot means the same as fleet.aws.capacity spot."""
    aws = config.fleet.aws
    return "spot" if config.fleet.spot and aws.capacity == "on-demand" else aws.capacity


def machines(config: Config, inputs: Inputs, tags: dict[str, str]) -> Resources:
    """Makes everything that computes, with its placement and its access."""
    found = {} if inputs.plain == "yes" else together(config)
    if not config.fleet.aws.key_pair and inputs.public_key:
        # The time in its name keeps it apart from a template that an earlier stack left.
        name = f"trainfleet-{config.fleet_name}-{inputs.created}"[:255]
        found[PAIR] = resource(
            "AWS::EC2::KeyPair", KeyName=name, PublicKeyMaterial=ref("PublicKey")
        )
    found["Template"] = _template(_node_data(config, inputs, tags), tags)
    if makes_file_system(config):  # takes ten minutes, during which nodes should not cost money
        found["Template"]["DependsOn"] = "FileSystem"
    found |= {f"{NODE}{slot}": _node(config, slot) for slot in inputs.slots}
    return found | (_head(config, inputs, tags) if config.fleet.aws.bastion_type else {})


def together(config: Config) -> Resources:
    """Makes the placement group; reserved machines are where their reservation puts them."""
    is_made = capacity_of(config) in ("on-demand", "spot")
    return {"Together": resource("AWS::EC2::PlacementGroup", Strategy="cluster")} if is_made else {}


def placement(config: Config, inputs: Inputs) -> Any:
    """Returns the placement group of the nodes: the reservation's, the new one, or None."""
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
    """Returns the part of a launch template that names the reservation or capacity block of its
    instances; empty without one.
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
    """Returns the common part of nodes and head; `part`: Node or Head."""
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
    """Returns the security part of any launch template: tokens for the metadata service, an
    encrypted volume, tags on all that an instance brings.
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
    """Returns a reference to the newest version of the stack's launch template."""
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
    """Writes a node's first boot: it sets the dead man's timer. `make setup` does the rest, because
    it can check and try again.
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
