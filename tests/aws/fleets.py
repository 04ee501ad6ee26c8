"""Fleets for the tests of templates: every instance type, kind of capacity and network that a config can ask for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainfleet.cloud.template_inputs import Inputs
from trainfleet.config import Config, Settings, load
from trainfleet.hardware import node_types
from trainfleet.recipes import FOLDER

CAPACITIES = ("on-demand", "spot", "reservation", "block")
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1qkUmTbFzOXSxV7b9fXkD6wzhTnnZlZ0Yb0a3m0000 you@here"
RESERVATION, VPC, SUBNET = (
    "cr-0123456789abcdef0",
    "vpc-0123456789abcdef0",
    "subnet-0123456789abcdef0",
)
ELSEWHERE = dict.fromkeys(
    ("trn2.48xlarge", "p5e.48xlarge"), "us-east-2"
)  # where cfn-lint's table has them
INPUTS = Inputs(
    "us-east-1", "us-east-1b", "123456789012", "you@example.com", "ami-0123456789abcdef0", "2026-11-22T06:00:00+00:00", (0, 1),
    public_key=KEY, head_image="ami-0123456789abcdef1",
)  # fmt: skip


@functools.cache
def recipe() -> Config:
    return load(Settings(FOLDER / "llama-3-8b-p5.yaml"))[0]


def fleet(
    instance_type: str = "p5.48xlarge", capacity: str = "on-demand", nodes: int = 2, **aws: Any
) -> Config:
    """A fleet that AWS is to make; further words are keys of fleet.aws, those of fleet.fsx begin with fsx_."""
    config = recipe()
    reservation = RESERVATION if capacity in ("reservation", "block") else None
    fsx = {
        name.removeprefix("fsx_"): aws.pop(name) for name in list(aws) if name.startswith("fsx_")
    }
    made = replace(config.fleet.aws, capacity=capacity, reservation=reservation, **aws)
    stack = node_types.platform_of(node_types.instance(instance_type))
    whole = replace(
        config.fleet, nodes=nodes, hosts=(), instance_type=instance_type, platform=stack, aws=made, shared_folder="/fsx/trainfleet",
        fsx=replace(config.fleet.fsx, dns_name=None, mount_name=None, mount_point="/fsx", **fsx),
        ranks_per_node=max(1, node_types.INSTANCE_TYPES[instance_type].accelerators),
    )  # fmt: skip
    return replace(config, fleet=whole)


def every() -> Iterator[tuple[str, Config, Inputs]]:
    """A name, a config and inputs for each template that must hold."""
    for name, row in node_types.INSTANCE_TYPES.items():
        for capacity in CAPACITIES:
            if capacity in row.sold or capacity == "reservation":
                yield (
                    f"{name}-{capacity}",
                    fleet(name, capacity),
                    replace(INPUTS, region=ELSEWHERE.get(name, "us-east-1")),
                )
    plain = fleet()
    yield (
        "own-network",
        fleet(vpc=VPC, subnets=(SUBNET,), allow_ssh_from=("10.0.0.0/8",)),
        replace(INPUTS, subnet=SUBNET),
    )
    yield (
        "head",
        fleet(bastion_type="c7i.xlarge", allow_ssh_from=("203.0.113.7/32", "198.51.100.0/24")),
        INPUTS,
    )
    yield (
        "own-bucket-and-key",
        fleet(bucket="mine-of-old", key_pair="my key"),
        replace(INPUTS, public_key=""),
    )
    yield (
        "persistent",
        fleet(fsx_type="persistent", fsx_throughput=1000, fsx_size_gib=4800, fsx_efa=True),
        INPUTS,
    )
    yield "persistent-plain", fleet(fsx_type="persistent", fsx_throughput=125), INPUTS
    yield "linked", fleet(fsx_s3_import="s3://corpus/web", fsx_s3_export=False), INPUTS
    yield (
        "no-file-system",
        replace(plain, fleet=replace(plain.fleet, shared_folder="/mnt/mine")),
        INPUTS,
    )
    yield (
        "expires",
        replace(plain, fleet=replace(plain.fleet, max_lifetime_hours=1.5, idle_minutes=None)),
        INPUTS,
    )
    yield "in-a-group", fleet(capacity="reservation"), replace(INPUTS, group="mine")
    yield "kept", plain, replace(INPUTS, kept=True, slots=())
    yield (
        "kept-bucket",
        replace(plain, fleet=replace(plain.fleet, shared_folder="/mnt/mine")),
        replace(INPUTS, kept=True, slots=()),
    )
    yield "bucket-is-there", plain, replace(INPUTS, has_bucket=True)
    yield "alone", fleet("trn1.32xlarge", nodes=1), replace(INPUTS, slots=(0,), plain="yes")
    yield "fleet.spot", replace(plain, fleet=replace(plain.fleet, spot=True)), INPUTS
    yield "no-nodes", plain, replace(INPUTS, slots=())
    yield "odd-name", replace(plain, name="a.b_c-" + "x" * 50), INPUTS
    yield (
        "government",
        fleet("c5n.18xlarge"),
        replace(INPUTS, region="us-gov-west-1", zone="us-gov-west-1a", partition="aws-us-gov"),
    )
