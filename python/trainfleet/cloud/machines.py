"""What EC2 says of the types in hardware.py beyond their size: network interfaces, local disks, how they are sold, quotas.

Sources: DescribeInstanceTypes (cards, EFA interfaces, disks and usage classes, read 2026-11-22 in the copy that moto 5.2.5
carries; tests/aws/test_templates.py compares), which agree with EC2's instance types guide, "Accelerated computing", Network
specifications (read 2026-11-22); the layout of interfaces, EC2 user guide, "Maximize network bandwidth on instances with multiple
network cards" (efa-acc-inst-types, read 2026-11-22), and for Trn1 Neuron's setup-trn1-multi-node-execution; quota codes, Service
Quotas' own list for EC2, as public listings of it have them (read 2026-11-22). Not in the table: Trn3, of which neither EC2's API
(botocore 1.44.5) nor that guide names a type yet, and P6e-GB200, whose processors are ARM's.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import hardware

SOLD = frozenset({"on-demand", "spot", "block"})
NO_BLOCK = SOLD - {"block"}


@dataclass(frozen=True)
class Interface:
    """A network interface as a launch template numbers it; `kind`: interface (plain), efa (with an address), efa-only."""

    card: int
    device: int
    kind: str


PLAIN = (Interface(0, 0, "interface"),)  # of a node that meets no other


@dataclass(frozen=True)
class Machine:
    """A type's local disks, and how it is sold: on-demand, spot, block (every type can be reserved).

    `efa_only`: its EFA interfaces take no addresses; a plain one comes first. `first_efa`: the first network card that has EFA.
    `slots`: the interfaces that card 0 holds.
    """

    nvme_gb: int
    sold: frozenset[str] = SOLD
    efa_only: bool = False
    first_efa: int = 0
    slots: int = 4


MACHINES = {
    "trn1.2xlarge": Machine(474, NO_BLOCK),
    "trn1.32xlarge": Machine(7600),
    "trn1n.32xlarge": Machine(7600, NO_BLOCK),
    "trn2.3xlarge": Machine(470, efa_only=True, slots=2),
    "trn2.48xlarge": Machine(7600, efa_only=True, slots=2),
    "trn2u.48xlarge": Machine(7600, SOLD - {"spot"}, efa_only=True, slots=2),
    "p3dn.24xlarge": Machine(1800, NO_BLOCK),
    "p4d.24xlarge": Machine(8000),
    "p4de.24xlarge": Machine(8000),
    "p5.4xlarge": Machine(3800, efa_only=True),
    "p5.48xlarge": Machine(30400, efa_only=True, slots=2),
    "p5e.48xlarge": Machine(30400, efa_only=True, slots=2),
    "p5en.48xlarge": Machine(30400, efa_only=True),
    "p6-b200.48xlarge": Machine(30400, efa_only=True),
    "p6-b300.48xlarge": Machine(30400, efa_only=True, first_efa=1),
    "g5.48xlarge": Machine(7600, NO_BLOCK),
    "g6.48xlarge": Machine(7520, NO_BLOCK),
    "g6e.48xlarge": Machine(7600, NO_BLOCK, efa_only=True),
    "c5n.18xlarge": Machine(0, NO_BLOCK),
    "c7i.8xlarge": Machine(0, NO_BLOCK),
}


def interfaces(name: str, tasks: int = 0) -> tuple[Interface, ...]:
    """The interfaces that give a node all its EFA devices, the primary first.

    `tasks`: interfaces that are attached to card 0 later, as ECS does for a container. Where the card can't hold them beside two
    others, one has both the address and EFA, as in AWS's own template for P5 on Batch.
    """
    row, machine = hardware.INSTANCE_TYPES[name], MACHINES[name]
    if machine.efa_only and machine.first_efa == 0 and 2 + tasks > machine.slots:
        return (Interface(0, 0, "efa"), *(Interface(card, 0, "efa-only") for card in range(1, row.efa)))
    if not machine.efa_only:
        return (Interface(0, 0, "efa" if row.efa else "interface"), *(Interface(card, 1, "efa") for card in range(1, row.efa)))
    cards = range(machine.first_efa, machine.first_efa + row.efa)  # behind the primary on card 0, the first device of any other
    return (Interface(0, 0, "interface"), *(Interface(card, 0 if card else 1, "efa-only") for card in cards))


def addresses(name: str) -> int:
    """Addresses of its subnet that a node takes: none for an interface that is EFA alone."""
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
UNCHECKED = {"p6"}  # spot: AWS has not published the code of its quota


def quota_of(name: str, capacity: str) -> Quota | None:
    """The quota that running such nodes counts against; None in a capacity block, which has one of its own when it is bought."""
    family = name.partition(".")[0].partition("-")[0]
    kind = next(word for word in ("trn", "p", "g", "c") if family.startswith(word))
    if capacity == "block" or (capacity == "spot" and family in UNCHECKED):
        return None
    if capacity == "spot":
        return SPOT["p5" if family.startswith("p5") else kind]
    return ON_DEMAND[kind]
