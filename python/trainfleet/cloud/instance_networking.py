"""The network interfaces that a launch template gives a node, and the quotas that nodes count
against.

The figures of each type: instance_types.json. Quota codes: Service Quotas' own list for EC2, as
public listings of it have them (read 2026-11-22).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware import node_types


@dataclass(frozen=True)
class Interface:
    """A network interface as a launch template numbers it; `kind`: interface (plain), efa (with an
    address), efa-only.
    """

    card: int
    device: int
    kind: str


PLAIN = (Interface(0, 0, "interface"),)  # of a node that meets no other


def interfaces(name: str, tasks: int = 0) -> tuple[Interface, ...]:
    """The interfaces that give a node all its EFA devices, the primary first.

    `tasks`: interfaces that are attached to card 0 later, as ECS does for a container. Where the
    card can't hold them beside two others, one has both the address and EFA, as in AWS's own
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
    # after the primary on card 0, the first device of any other
    cards = range(row.first_efa, row.first_efa + row.efa)
    return (
        Interface(0, 0, "interface"),
        *(Interface(card, 0 if card else 1, "efa-only") for card in cards),
    )


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


def quota_of(name: str, capacity: str) -> Quota | None:
    """The quota that running such nodes counts against.

    None in a capacity block, which has a separate one when it is bought, and if AWS has not
    published the quota's code.
    """
    row = node_types.INSTANCE_TYPES[name]
    if capacity == "block":
        return None
    return SPOT.get(row.spot_quota) if capacity == "spot" else ON_DEMAND[row.quota]
