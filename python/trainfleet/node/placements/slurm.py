"""Placement of tasks started by srun, one per node (https://slurm.schedmd.com/srun.html, OUTPUT
ENVIRONMENT VARIABLES).
"""

from __future__ import annotations

import os

from ..placement import Environment, Placement, PlacementSource, Variables, checked, expand_hosts


def read(environment: Environment = os.environ) -> Placement:
    """Returns the task's placement from Slurm's environment variables.

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
PLACEMENT = PlacementSource("slurm", read, lambda: "SLURM_JOB_ID" in os.environ)
