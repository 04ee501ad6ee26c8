"""Placement sources of all schedulers. Uses only the standard library, because both the launcher
and the nodes import it.

Another package can add a scheduler through an entry point in the group `trainfleet.placements`
(process/install_paths.py) that names a `PlacementSource`. The package's backend sets `placement` to
the same object.

The functions follow each scheduler's documentation of its environment (sources:
tests/unit/test_placement.py). They have not been tested on real Slurm, AWS Batch or SageMaker
nodes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..process import install_paths
from ..trust.errors import BackendError
from ..trust.untrusted_input import whole
from .placement import (
    LOOPBACK,
    NEXT,
    PORT,
    Environment,
    Placement,
    PlacementSource,
    Terms,
    Variables,
    checked,
    expand_hosts,
    own_address,
)

RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")


def read_fleet(environment: Environment = os.environ) -> Placement:
    """Returns the placement of a node that trainfleet's own backends (local, ssh, ec2) started,
    from the variables of `Placement.environment`.
    """
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


FLEET = PlacementSource("fleet", read_fleet, lambda: "TRAINFLEET_NODE" in os.environ, Terms(wait=0))


def read_batch(environment: Environment = os.environ) -> Placement:
    """Returns the placement of an AWS Batch job's node
    (https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html).

    The main node becomes node 0, regardless of its index. Batch passes the main node's address only
    to the other nodes, so the main node determines it here.
    """
    told = Variables("AWS_BATCH_JOB_", environment)
    told.word(
        "ID"
        # Only this variable is required, because single-node jobs do not set the others. If it were
        # optional too, any process would look like a single-node job.
    )
    nodes = told.number("NUM_NODES", 1)
    index = told.number("NODE_INDEX", 0)
    main = told.number("MAIN_NODE_INDEX", 0)
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
BATCH = PlacementSource(
    "batch", read_batch, lambda: "AWS_BATCH_JOB_ID" in os.environ, Terms(echoes=True, decides=True)
)


def read_slurm(environment: Environment = os.environ) -> Placement:
    """Returns the placement of a task started by srun, one per node
    (https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES).

    The port depends on the job ID and the restart count, because jobs that share a node must use
    different ports and a requeued job's first port may still be in use.
    """
    told = Variables("SLURM_", environment)
    nodes = told.number("STEP_NUM_NODES", told.number("JOB_NUM_NODES", told.number("NNODES", 1)))
    hosts = list(expand_hosts(told.word("STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))))
    restarts = told.number("RESTART_COUNT", 0)
    # below the ephemeral ports, which start at 32768
    port = 20000 + (told.number("JOB_ID") + restarts) % 10000
    placement = Placement(
        told.number("NODEID"),
        nodes,
        hosts[0],
        port,
        restarts + 1,
        environment.get("SLURMD_NODENAME", ""),
    )
    return checked(placement, "SLURM_NODEID")


# Slurm's KillWait defaults to 30 s.
SLURM = PlacementSource("slurm", read_slurm, lambda: "SLURM_JOB_ID" in os.environ)


def read_sagemaker(file: Path = RESOURCES) -> Placement:
    """Returns the placement of a SageMaker training job's host from its resourceconfig.json
    (https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html).
    The attempt is always 1, because SageMaker does not report retries.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        hosts = sorted(map(str, record["hosts"]), key=_by_number)
        own = str(record["current_host"])
        return checked(Placement(hosts.index(own), len(hosts), hosts[0], PORT, 1, own), str(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(
            "can't identify this host in the job",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            next=NEXT,
        ) from error


def _by_number(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders algo-2 before algo-10, as consoles and logs do."""
    return [
        (-1, part) if (number := whole(part)) is None else (number, "")
        for part in re.split(r"([0-9]+)", name)
    ]


# SageMaker allows 120 s:
# https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StoppingCondition.html
TERMS = Terms(grace=110, echoes=True, failure=Path("/opt/ml/output/failure"))
SAGEMAKER = PlacementSource("sagemaker", read_sagemaker, lambda: RESOURCES.exists(), TERMS)

# trainfleet's own launcher takes precedence over a scheduler that started the launcher.
OURS = {source.name: source for source in (FLEET, BATCH, SLURM, SAGEMAKER)}


def source(name: str) -> PlacementSource:
    """Returns the placement source of the scheduler with this name.

    Raises:
        BackendError: the scheduler is unknown, or a package's object with this name is not a
            PlacementSource.
    """
    found = OURS[name] if name in OURS else install_paths.offered(install_paths.OF_PLACEMENTS, name)
    if not isinstance(found, PlacementSource):
        why = (
            f"it is not one of {', '.join(OURS)}, and no installed package adds it "
            f"({install_paths.OF_PLACEMENTS})"
        )
        raise BackendError(f"{name[:80]!r} is not a known scheduler", why=why, next=NEXT)
    return found


def names() -> Iterator[str]:
    yield from OURS
    yield from install_paths.names_offered(install_paths.OF_PLACEMENTS)


def here() -> PlacementSource:
    """Returns the placement source of the scheduler that started this node.

    Raises:
        BackendError: no known scheduler started this process.
    """
    if found := next(
        (engine for name in names() if (engine := source(name)).has_started_this()), None
    ):
        return found
    raise BackendError(
        "this process was not started as a node of a job",
        why=f"the environment has no variables of a known scheduler ({', '.join(names())})",
        next=NEXT,
    )
