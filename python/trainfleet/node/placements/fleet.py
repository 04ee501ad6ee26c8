"""The seat that this program's own backends (local, ssh, ec2) give a node: see
`Seat.environment`.
"""

from __future__ import annotations

import os

from ..placement import Environment, Seat, Seating, Terms, Variables, checked


def read(environment: Environment = os.environ) -> Seat:
    told = Variables("TRAINFLEET_", environment)
    nodes = told.number("NODES")
    seat = Seat(
        told.number("NODE"),
        nodes,
        told.word("MEET"),
        told.number("PORT"),
        told.number("ATTEMPT", 1),
        told.word("ADDRESS", ""),
    )
    return checked(seat, "TRAINFLEET_NODE")


SEATING = Seating("fleet", read, lambda: "TRAINFLEET_NODE" in os.environ, Terms(wait=0))
