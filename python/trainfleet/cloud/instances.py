"""Makes the machines' part of a template: launch template, instances, placement group and head; and
defines the quotas that nodes count against.

Each node is a separate AWS::EC2::Instance, `Node<slot>`, so a stack update adds and removes single
nodes without changing the others. CreateFleet may mix instance types, and an Auto Scaling group
replaces nodes at once. But a job needs one type and all its nodes, and replaces a node only after
the watch has judged it.

instance_types.json has the figures of each type.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.tables import read_table
from ..hardware import node_types
from ..process.install_paths import ROOT
from .calls import Json
from .template_inputs import Inputs, pairs
from .template_parts import Resource, Resources, attribute, fixed, ref, resource, subnet
from .template_storage import has_file_system, makes_file_system


@dataclass(frozen=True)
class Interface:
    """A network interface in a launch template. `kind`: interface (no EFA), efa (EFA and an
    address), or efa-only (no address).
    """

    card: int
    device: int
    kind: str


PLAIN = (Interface(0, 0, "interface"),)  # the interface of a single node


def interfaces(name: str, tasks: int = 0) -> tuple[Interface, ...]:
    """Returns the interfaces that give a node all its EFA devices, the primary one first.

    `tasks`: interfaces that are attached to card 0 later, such as by ECS for a container. If the
    card has no slots for them, the primary interface has both EFA and the address, as in AWS's
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

    None for a capacity block, which has a separate quota when it is bought, and if the quota's code
    is unknown.
    """
    row = node_types.INSTANCE_TYPES[name]
    if capacity == "block":
        return None
    if capacity == "spot":
        return QUOTAS["spot"].get(row.spot_quota)
    return QUOTAS["on-demand"][row.quota]


SCRIPTS = ROOT / "scripts"
PAIR = "KeyPair"
HEAD_GIB = 100  # GiB of the head's disk
NODE = "Node"  # prefix of a node's logical id
# Logical id and type of the machine that builds the Python environment before the nodes exist
BUILDER, BUILDER_TYPE, BUILDER_VCPUS = "Builder", "c7i.xlarge", 4


def capacity_of(config: Config) -> str:
    """Returns the kind of capacity. fleet.spot is the same as fleet.aws.capacity spot."""
    aws = config.fleet.aws
    return "spot" if config.fleet.spot and aws.capacity == "on-demand" else aws.capacity


def machines(config: Config, inputs: Inputs, tags: dict[str, str]) -> Resources:
    """Builds the nodes and the head, with launch templates, placement group and key pair."""
    found = {} if inputs.plain == "yes" else together(config)
    if not config.fleet.aws.key_pair and inputs.public_key:
        # The time makes the name unique, because an earlier stack may have left a key pair.
        name = f"trainfleet-{config.fleet_name}-{inputs.created}"[:255]
        found[PAIR] = resource(
            "AWS::EC2::KeyPair", KeyName=name, PublicKeyMaterial=ref("PublicKey")
        )
    found["Template"] = _template(_node_data(config, inputs, tags), tags)
    if makes_file_system(config):  # takes ten minutes, during which nodes would cost money
        found["Template"]["DependsOn"] = "FileSystem"
    found |= {f"{NODE}{slot}": _node(config, slot) for slot in inputs.slots}
    found |= _builder(config, inputs, tags) if inputs.builds else {}
    return found | (_head(config, inputs, tags) if config.fleet.aws.bastion_type else {})


def builds_first(config: Config) -> bool:
    """Returns whether a cheap machine builds the Python environment before the nodes exist. It
    needs a file system that outlives the machine, and pays only for nodes with accelerators.
    """
    row = node_types.instance(config.fleet.instance_type)
    return bool(row and row.accelerator and has_file_system(config) and not config.fleet.python)


def _builder(config: Config, inputs: Inputs, tags: dict[str, str]) -> Resources:
    """Creates the machine that builds the Python environment. It boots the nodes' image, because
    the environment must fit their Python.
    """
    aws = replace(config.fleet.aws, capacity="on-demand", reservation=None)
    fleet = replace(config.fleet, instance_type=BUILDER_TYPE, spot=False, aws=aws)
    own = replace(config, fleet=fleet)
    data = _node_data(own, replace(inputs, plain="yes", group=None), tags)
    return {"BuilderTemplate": _template(data, tags)} | fixed("builder", FLEET=config.fleet_name)


def together(config: Config) -> Resources:
    """Builds the placement group, or {} for reserved machines, which their reservation places."""
    is_made = capacity_of(config) in ("on-demand", "spot")
    return {"Together": resource("AWS::EC2::PlacementGroup", Strategy="cluster")} if is_made else {}


def placement(config: Config, inputs: Inputs) -> Any:
    """Returns the nodes' placement group (the reservation's or the stack's), or None."""
    return inputs.group or (ref("Together") if together(config) and inputs.plain == "no" else None)


def _node(config: Config, slot: int) -> Resource:
    return fixed("node", NAME=f"{config.fleet_name}-{slot}")


def _node_data(config: Config, inputs: Inputs, tags: dict[str, str]) -> Json:
    fleet, capacity = config.fleet, capacity_of(config)
    data = _common(config, inputs, tags, fleet.instance_type or "", fleet.aws.volume_gib, "Node")
    cards = PLAIN if inputs.plain == "yes" else interfaces(fleet.instance_type or "")
    data["NetworkInterfaces"] = attached(cards, SubnetId=subnet(inputs))
    data["UserData"] = base64.b64encode(user_data(config).encode()).decode()
    # Spot instances and instances in a capacity block can't be stopped, only terminated.
    data["InstanceInitiatedShutdownBehavior"] = (
        "stop" if capacity in ("on-demand", "reservation") else "terminate"
    )
    if group := placement(config, inputs):
        data["Placement"] = {"GroupName": group}
    if capacity == "spot":
        once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        data["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": once}
    return data | reserved(config)


def attached(cards: Iterable[Interface], **more: Any) -> list[Json]:
    """Returns interfaces of the nodes' security group in a launch template's words."""
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
    """Returns the launch template's keys for a reservation or capacity block, or {} without one."""
    capacity, data = capacity_of(config), Json()
    if capacity == "block":
        data["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    if config.fleet.aws.reservation and capacity in ("reservation", "block"):
        target = {"CapacityReservationId": config.fleet.aws.reservation}
        data["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    return data


def _common(
    config: Config, inputs: Inputs, tags: dict[str, str], kind: str, volume: int, part: str
) -> Json:
    """Returns the common launch template data of nodes and head. `part`: Node or Head."""
    data = {
        "ImageId": ref("HeadImage" if part == "Head" else "Image"),
        "InstanceType": kind,
        "IamInstanceProfile": {"Arn": attribute(f"{part}Profile", "Arn")},
        **hardened(ref("Root"), volume, tags),
    }
    if config.fleet.aws.key_pair or inputs.public_key:
        data["KeyName"] = config.fleet.aws.key_pair or ref(PAIR)
    return data


def hardened(root: Any, volume: int, tags: dict[str, str]) -> Json:
    """Returns the security settings and tags of every launch template."""
    return fixed("hardened", ROOT=root, SIZE=volume, TAGS=pairs(tags))


def _template(data: Json, tags: dict[str, str]) -> Resource:
    return fixed("template", TAGS=pairs(tags), DATA=data)


def _head(config: Config, inputs: Inputs, tags: dict[str, str]) -> Resources:
    """Builds the head, a machine with a public address through which SSH reaches the nodes."""
    data = _common(config, inputs, tags, config.fleet.aws.bastion_type or "", HEAD_GIB, "Head")
    data |= fixed("public")
    return {"HeadTemplate": _template(data, tags)} | fixed("head", FLEET=config.fleet_name)


def user_data(config: Config) -> str:
    """Returns the first-boot script of a node, which only starts the dead man's timer.

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
