"""Placement of AWS Batch job nodes
(https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html).
"""

from __future__ import annotations

import os

from ...trust.errors import BackendError
from ..placement import (
    LOOPBACK,
    NEXT,
    PORT,
    Environment,
    Placement,
    PlacementSource,
    Terms,
    Variables,
    checked,
    own_address,
)


def read(environment: Environment = os.environ) -> Placement:
    """Returns the node's placement from Batch's environment variables.

    The main node becomes node 0, regardless of its index. Batch passes the main node's address only
    to the other nodes, so the main node determines it here.
    """
    told = Variables("AWS_BATCH_JOB_", environment)
    told.word(
        "ID"
        # Only this variable is required, because single-node jobs do not set the others. If it were
        # optional as well, any process would pass for a single-node job.
    )
    nodes, index, main = (
        told.number("NUM_NODES", 1),
        told.number("NODE_INDEX", 0),
        told.number("MAIN_NODE_INDEX", 0),
    )
    meet = (
        told.word("MAIN_NODE_PRIVATE_IPV4_ADDRESS", "")
        if index != main
        else own_address()
        if nodes > 1
        else LOOPBACK
    )
    if not meet:
        raise BackendError(
            "this node of an AWS Batch job has no rendezvous address",
            where=f"node {index}",
            why="AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set",
            next=NEXT,
        )
    node = 0 if index == main else index + 1 if index < main else index
    return checked(
        Placement(node, nodes, meet, PORT, told.number("ATTEMPT", 1)), "AWS_BATCH_JOB_NODE_INDEX"
    )


# Batch allows 30 s: https://docs.aws.amazon.com/batch/latest/userguide/job_timeouts.html
PLACEMENT = PlacementSource(
    "batch", read, lambda: "AWS_BATCH_JOB_ID" in os.environ, Terms(echoes=True, decides=True)
)
