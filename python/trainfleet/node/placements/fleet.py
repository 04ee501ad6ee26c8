"""Placement of nodes started by trainfleet's own backends (local, ssh, ec2). The environment
variables are those of `Placement.environment`.
"""

from __future__ import annotations

import os

from ..placement import Environment, Placement, PlacementSource, Terms, Variables, checked


def read(environment: Environment = os.environ) -> Placement:
    told = Variables("TRAINFLEET_", environment)
    nodes = told.number("NODES")
    placement = Placement(
        told.number("NODE"),
        nodes,
        told.word("MEET"),
        told.number("PORT"),
        told.number("ATTEMPT", 1),
        told.word("ADDRESS", ""),
    )
    return checked(placement, "TRAINFLEET_NODE")


PLACEMENT = PlacementSource("fleet", read, lambda: "TRAINFLEET_NODE" in os.environ, Terms(wait=0))
