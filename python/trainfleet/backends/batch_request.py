"""Builds AWS Batch requests: multi-node job definitions and job submissions. Pure.

All nodes share one node range. Batch allows at most five ranges, so a range per node would limit
jobs to five nodes
(https://docs.aws.amazon.com/batch/latest/userguide/create-multi-node-job-definition.html, and
pytorch/torchx #700).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from ..cloud.scheduler_template import GRACE as STOPS
from ..cloud.template_inputs import own_tags, slug
from ..config import Config
from ..hardware import node_types
from ..node.entrypoint import AGAIN, GRACE
from ..node.placements import BATCH as PLACEMENT
from ..plan.job import Job
from .aws_managed import EXECUTION_ROLE, JOB_ROLE, LOG_GROUP
from .node_script import Body, entrypoint_words, environment, form, pairs

# Fraction of node memory for the container. The rest is for the operating system and ECS agent.
SHARE = 0.92
MARGIN = 10.0  # seconds reserved for a node's last log lines before it ends
MOST_SHARED = 64  # maximum size of /dev/shm, in GiB
DEVICE_RANKS = {"NeuronCore-v2": 2, "NeuronCore-v3 x2": 4}  # ranks per device file (/dev/neuron<i>)
MIB_A_GIB = 1024
PERMISSIONS = ["READ", "WRITE", "MKNOD"]


def definition(config: Config, job: Job, image: str, secrets: Mapping[str, str]) -> Body:
    """Returns the RegisterJobDefinition request body.

    The definition's name contains a hash of all other fields, so identical definitions are
    registered only once.

    Batch retries machine failures, but not errors that would recur. If a node other than the main
    node is lost, the main node's ranks fail too, and it exits with AGAIN (watch/node_verdict.py).
    """
    batch, hours = config.fleet.batch, config.fleet.batch.timeout_hours
    held = [entry.split("=") for entry in batch.consumable_resources]
    body: Body = form(
        "job definition",
        NODES=job.nodes,
        IMAGE=image,
        SECRETS=[{"name": name, "valueFrom": where} for name, where in sorted(secrets.items())]
        or None,
        CONSUMED=[{"consumableResource": name, "quantity": int(count)} for name, count in held]
        or None,
        ATTEMPTS=batch.attempts,
        LOST=str(AGAIN),
        TAGS=own_tags(config.fleet_name),
        LONGEST=max(60, round(hours * 3600)) if hours else None,
        **_container(config),
    )
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
    return {"jobDefinitionName": f"{slug(config.name, 40)}-{job.kind}-{digest}", **body}


def _container(config: Config) -> Body:
    """Returns a job definition's values that depend only on the machines and the config.

    A container gets the whole machine with all devices, except for a small part of the memory.
    """
    row, batch = node_types.INSTANCE_TYPES[config.fleet.instance_type or ""], config.fleet.batch
    needs = {"VCPU": row.vcpus, "MEMORY": int(row.memory_gib * SHARE * MIB_A_GIB)}
    if row.kind == "cuda":
        needs["GPU"] = row.accelerators
    mount = config.fleet.fsx.dns_name and config.fleet.fsx.mount_point
    # only the stack's execution role may write to the stack's log group, which is deleted with the
    # stack
    logging = {"logDriver": "awslogs", "options": {"awslogs-group": LOG_GROUP}}
    return {
        "MACHINE": row.name,
        "JOB_ROLE": batch.job_role or JOB_ROLE,
        "EXECUTION_ROLE": batch.execution_role or EXECUTION_ROLE,
        "NEEDS": [{"type": kind, "value": str(value)} for kind, value in needs.items()],
        "SHARED": (batch.shared_memory_gib or min(MOST_SHARED, row.memory_gib // 4)) * MIB_A_GIB,
        "DEVICES": [
            {"hostPath": path, "containerPath": path, "permissions": PERMISSIONS}
            for path in _devices(row)
        ],
        # the launch template mounts the file system on the node
        "VOLUMES": [{"name": "fsx", "host": {"sourcePath": mount}}] if mount else None,
        "MOUNTS": [{"sourceVolume": "fsx", "containerPath": mount}] if mount else None,
        "LOGGING": None if batch.execution_role else logging,
    }


def _devices(row: node_types.NodeType) -> list[str]:
    """Returns the device files to map into the container.

    Excludes GPUs, which Batch adds.
    """
    found = [f"/dev/infiniband/uverbs{number}" for number in range(row.efa)]
    if row.accelerator and row.accelerator.kind == "neuron":
        files = row.accelerators // DEVICE_RANKS[row.accelerator.name]
        found += [f"/dev/neuron{number}" for number in range(files)]
    return found


def grace(config: Config) -> float:
    """Returns the seconds that ranks have to save when Batch stops a node.

    Machines created by setup allow more time than those behind a user-provided queue.
    """
    return PLACEMENT.terms.grace if config.fleet.batch.queue else STOPS - MARGIN


def submission(config: Config, job: Job, queue: str, definition: str) -> Body:
    """Returns the SubmitJob request body, without the job name and the attempt's environment
    variables.
    """
    batch = config.fleet.batch
    variables = environment(config, job) | ({} if batch.queue else {GRACE: f"{grace(config):g}"})
    body: Body = form(
        "submission",
        QUEUE=queue,
        DEFINITION=definition,
        NODES=job.nodes,
        COMMAND=entrypoint_words(job, PLACEMENT),
        VARIABLES=pairs(variables),
        SHARE=batch.share or None,
        PRIORITY=batch.priority,
        TAGS=own_tags(config.fleet_name),
    )
    return body
