"""Placement of a task that srun started, one per node (https://slurm.schedmd.com/srun.html, OUTPUT
ENVIRONMENT VARIABLES).
"""

from __future__ import annotations

import os

from ..placement import Environment, Placement, PlacementSource, Variables, checked, expand_hosts


def read(environment: Environment = os.environ) -> Placement:
    """Returns the placement of a task.

    Jobs that share a node must not share a port, and a requeued job's first port may still be in
    use. So the port depends on the job's id and its number of restarts.
    """
    told = Variables("SLURM_", environment)
    nodes = told.number("STEP_NUM_NODES", told.number("JOB_NUM_NODES", told.number("NNODES", 1)))
    hosts = list(expand_hosts(told.word("STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))))
    restarts = told.number("RESTART_COUNT", 0)
    # Below the ports that kernels give to clients (from 32768).
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


# Slurm's KillWait is 30 s by default.
PLACEMENT = PlacementSource("slurm", read, lambda: "SLURM_JOB_ID" in os.environ)
