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
from .node_script import Body, entrypoint_words, environment, pairs

ABSENT = 69  # exit code if a node never reached the barrier (node/barrier.py)
KILLED = 137  # exit code after SIGKILL from the OOM killer or a user
# Fraction of node memory for the container. The rest is for the operating system and ECS agent.
SHARE = 0.92
MARGIN = 10.0  # seconds reserved for a node's last log lines before it ends
MOST_SHARED = 64  # maximum size of /dev/shm, in GiB
DEVICE_RANKS = {"NeuronCore-v2": 2, "NeuronCore-v3 x2": 4}  # ranks per device file (/dev/neuron<i>)
MIB_A_GIB = 1024
PERMISSIONS = ["READ", "WRITE", "MKNOD"]


def definition(config: Config, job: Job, image: str, secrets: Mapping[str, str]) -> Body:
    """Returns the RegisterJobDefinition request body.

    The name contains a hash of all other fields, so identical definitions are registered only once.
    """
    body: Body = {
        "type": "multinode",
        "nodeProperties": {
            "numNodes": job.nodes,
            "mainNode": 0,
            "nodeRangeProperties": [
                {
                    "targetNodes": "0:",
                    "container": container(config, image, secrets),
                    **held(config),
                }
            ],
        },
        "retryStrategy": retries(config.fleet.batch.attempts),
        "propagateTags": True,
        "tags": own_tags(config.fleet_name),
    }
    if hours := config.fleet.batch.timeout_hours:
        body["timeout"] = {"attemptDurationSeconds": max(60, round(hours * 3600))}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
    return {"jobDefinitionName": f"{slug(config.name, 40)}-{job.kind}-{digest}", **body}


def held(config: Config) -> Body:
    """Returns the consumable resources that each node requires."""
    entries = [entry.split("=") for entry in config.fleet.batch.consumable_resources]
    if not entries:
        return {}
    held = [{"consumableResource": name, "quantity": int(quantity)} for name, quantity in entries]
    return {"consumableResourceProperties": {"consumableResourceList": held}}


def container(config: Config, image: str, secrets: Mapping[str, str]) -> Body:
    """Returns the container properties shared by all nodes, without the command.

    The container gets the whole machine with all devices, except for a small part of the memory.
    """
    row, batch = node_types.INSTANCE_TYPES[config.fleet.instance_type or ""], config.fleet.batch
    shared = batch.shared_memory_gib or min(MOST_SHARED, row.memory_gib // 4)
    needs = {"VCPU": row.vcpus, "MEMORY": int(row.memory_gib * SHARE * MIB_A_GIB)}
    if row.kind == "cuda":
        needs["GPU"] = row.accelerators
    body: Body = {
        "image": image,
        "instanceType": row.name,
        "jobRoleArn": batch.job_role or JOB_ROLE,
        "executionRoleArn": batch.execution_role or EXECUTION_ROLE,
        "resourceRequirements": [
            {"type": kind, "value": str(value)} for kind, value in needs.items()
        ],
        "linuxParameters": {
            "initProcessEnabled": True,
            "sharedMemorySize": shared * MIB_A_GIB,
            "devices": [
                {"hostPath": path, "containerPath": path, "permissions": PERMISSIONS}
                for path in devices(row)
            ],
        },
        # EFA locks the memory it registers for RDMA, so memlock must be unlimited
        "ulimits": [
            {"name": name, "softLimit": most, "hardLimit": most}
            for name, most in (("memlock", -1), ("nofile", 65535))
        ],
        "secrets": [{"name": name, "valueFrom": where} for name, where in sorted(secrets.items())],
        **mounts(config),
    }
    # only the stack's execution role may write to the stack's log group, which is deleted with the
    # stack
    if not batch.execution_role:
        body["logConfiguration"] = {"logDriver": "awslogs", "options": {"awslogs-group": LOG_GROUP}}
    return {name: value for name, value in body.items() if value}


def devices(row: node_types.NodeType) -> list[str]:
    """Returns the device files to map into the container.

    Excludes GPUs, which Batch adds.
    """
    found = [f"/dev/infiniband/uverbs{number}" for number in range(row.efa)]
    if row.accelerator and row.accelerator.kind == "neuron":
        found += [
            f"/dev/neuron{number}"
            for number in range(row.accelerators // DEVICE_RANKS[row.accelerator.name])
        ]
    return found


def mounts(config: Config) -> Body:
    """Returns the bind mount for the FSx file system, which the launch template mounts on
    the node.
    """
    if config.fleet.fsx.dns_name is None:
        return {}
    folder = config.fleet.fsx.mount_point
    return {
        "volumes": [{"name": "fsx", "host": {"sourcePath": folder}}],
        "mountPoints": [{"sourceVolume": "fsx", "containerPath": folder}],
    }


def retries(attempts: int) -> Body:
    """Returns the Batch retry strategy, which retries machine failures but not errors that would
    recur.

    Batch evaluates only the exit code of a multi-node job's main node. If another node is lost, the
    main node's ranks fail too, and the main node exits with AGAIN (watch/node_verdict.py).
    """
    again = [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        *({"onExitCode": str(code), "action": "RETRY"} for code in (AGAIN, ABSENT, KILLED)),
        {"onReason": "*", "action": "EXIT"},
    ]
    return {"attempts": attempts, "evaluateOnExit": again}


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
    words = entrypoint_words(job, PLACEMENT)
    variables = environment(config, job) | ({} if batch.queue else {GRACE: f"{grace(config):g}"})
    override = {"command": words, "environment": pairs(variables)}
    share = {"shareIdentifier": batch.share} if batch.share else {}
    priority = {"schedulingPriorityOverride": batch.priority} if batch.priority is not None else {}
    return {
        "jobQueue": queue,
        "jobDefinition": definition,
        "nodeOverrides": {
            "numNodes": job.nodes,
            "nodePropertyOverrides": [{"targetNodes": "0:", "containerOverrides": override}],
        },
        **share,
        **priority,
        "propagateTags": True,
        "tags": own_tags(config.fleet_name),
    }
