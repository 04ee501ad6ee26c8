"""Instances that are more than records: each is a node of the lab with its own sshd, and shows its host key on the console only.

A node that ends with its instance stays off: another instance is another node. The head, where a config asks for one, is none.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fleet.lab import Lab, address_of
from metadata import Service

from .account import Account, Thing

CONSOLE = """[    4.201933] cloud-init[612]: Cloud-init v. 24.1 running 'modules:final'
ci-info: no authorized SSH keys fingerprints found for user ubuntu.
-----BEGIN SSH HOST KEY KEYS-----
{key} root@ip-10-77-0-2
-----END SSH HOST KEY KEYS-----
[    5.117301] cloud-init[612]: Cloud-init v. 24.1 finished
"""


VPC, SUBNET = (
    "vpc-0123456789abcdef0",
    "subnet-0123456789abcdef0",
)  # the network that the lab's nodes stand in, which is the user's


def theirs(account: Account) -> None:
    """The user's own network, which no fleet makes or takes down."""
    account.add("vpc", VPC, {"CidrBlock": "10.77.0.0/16"}, {"Name": "lab"})
    account.add(
        "subnet",
        SUBNET,
        {"CidrBlock": "10.77.0.0/16", "VpcId": VPC, "AvailabilityZone": account.zones[0]},
        {"Name": "lab"},
    )


def on_metal(lab: Lab) -> dict[str, Any]:
    """What a config says of its fleet so that its instances are nodes of the lab, reached by their own addresses."""
    aws = {
        "region": "us-east-1",
        "vpc": VPC,
        "subnets": [SUBNET],
        "allow_ssh_from": ["10.77.0.0/16"],
        "zones": ["us-east-1a"],
    }
    ssh = {"user": "root", "key": str(lab.key)}
    return {
        "instance_type": "c7i.8xlarge",
        "fsx": {"mount_point": "/lustre"},
        "aws": aws,
        "ssh": ssh,
    }


@contextmanager
def metadata() -> Iterator[Service]:
    """The metadata service at its own address in the lab's network."""
    subprocess.run(["ip", "addr", "add", "169.254.169.254/32", "dev", "lab"], check=True)
    with Service(("169.254.169.254", 80)) as service:
        yield service
        service.shutdown()


class Metal:
    """The lab's nodes as what the account's instances run on; `node_of`: instance id → node."""

    def __init__(self, lab: Lab, account: Account) -> None:
        self.lab, self.node_of = lab, dict[str, int]()
        self.free = list(range(lab.count))
        account.address_of, account.on_end, account.on_launch = self.address, self.end, self.begin

    def address(self, instance: Thing) -> str:
        self.node_of[instance.id] = self.free.pop(0)
        return address_of(self.node_of[instance.id])

    def begin(self, instance: Thing) -> None:
        key = self.lab.host_key(self.node_of[instance.id])
        instance.more["console"] = CONSOLE.format(key=key)

    def end(self, instance: Thing) -> None:
        self.lab.destroy(self.node_of[instance.id])
