"""Builds AWS Batch requests (multi-node job definitions and job submissions), and explains why a
job is still queued or would stay queued forever.

All nodes share one node range. Batch allows at most five ranges, so a range per node would limit
jobs to five nodes
(https://docs.aws.amazon.com/batch/latest/userguide/create-multi-node-job-definition.html, and
pytorch/torchx #700).

The explanation is the status reason that Batch reports for the first job in the queue, or else the
state of the queue and its compute environments. Reason codes and their causes:
https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping

from ..cloud.calls import Calls, Json
from ..cloud.quotas import Obstacle
from ..cloud.scheduler_template import GRACE as STOPS
from ..cloud.template_inputs import Inputs, own_tags, slug
from ..config import Config
from ..hardware import node_types
from ..node.entrypoint import AGAIN, GRACE
from ..node.placements import BATCH as PLACEMENT
from ..plan.job import Job
from ..trust.errors import CloudError
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


PACE = 30.0  # polling interval per queue in seconds
CODES = {
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": (
        "EC2 has no free capacity for this instance type; try another zone or a reservation"
    ),
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": (
        "maxvCpus is too low for the job; run make setup to raise it"
    ),
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": (
        "no instance type of the compute environment is large enough for a node, or no instance "
        "has started yet"
    ),
    "MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED": (
        "EC2 does not support the instance configuration of the launch template"
    ),
    "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS": "the compute environment's "
    "service role lacks permissions",
    "ACTION_REQUIRED": (
        "the compute environment is disabled, invalid, or can't start instances; check its "
        "role, network and image"
    ),
    "UNDETERMINED": (
        "Batch gives no reason; check the vCPU quota, and that instances can reach ECS (NAT "
        "gateway)"
    ),
}


class QueueReasons:
    """Reasons why a queue's jobs have not started.

    Polls the queue at most once per PACE seconds.
    """

    def __init__(self, calls: Callable[[], Calls], queue: str) -> None:
        self.calls, self.queue = calls, queue
        self.found, self.when = "", -PACE

    def why(self, job: Json) -> str:
        """Returns why a job has not started, or "" if it has."""
        if job["status"] not in ("SUBMITTED", "PENDING", "RUNNABLE"):
            return ""
        said = str(job.get("statusReason") or "")
        for code, words in CODES.items():
            if said.startswith(code):
                return f"{job['status']}: {words} ({said})"
        return f"{job['status']}: {said or self._look()}"

    def _look(self) -> str:
        if time.monotonic() - self.when > PACE:
            try:
                self.found = next(_obstacles(self.calls(), self.queue), "machines are starting")
            except CloudError as error:
                self.found = f"the reason is unknown: {error.what}"
            self.when = time.monotonic()
        return self.found


def _obstacles(calls: Calls, queue: str) -> Iterator[str]:
    """Yields the obstacles that keep the queue's jobs from starting, most likely first."""
    queues = calls("batch", "DescribeJobQueues", jobQueues=[queue]).get("jobQueues") or [{}]
    if queues[0].get("state") == "DISABLED":
        yield f"the queue {queue} is disabled; run {enabling(queue)}"
    for one in environments(calls, queues[0]):
        name = one["computeEnvironmentName"]
        if one.get("status") == "INVALID":
            yield (
                f"the compute environment {name} is invalid: "
                f"{one.get('statusReason', 'no reason given')}"
            )
        if one.get("state") == "DISABLED":
            yield f"the compute environment {name} is disabled"
    ahead = calls("batch", "ListJobs", jobQueue=queue, jobStatus="RUNNING").get(
        "jobSummaryList", ()
    )
    if ahead:
        yield f"{len(ahead)} jobs of the queue are running"


def enabling(queue: str) -> str:
    return f"aws batch update-job-queue --job-queue {queue} --state ENABLED"


def environments(calls: Calls, queue: Json) -> list[Json]:
    names = [entry["computeEnvironment"] for entry in queue.get("computeEnvironmentOrder", ())]
    if not names:
        return []
    return list(
        calls("batch", "DescribeComputeEnvironments", computeEnvironments=names).get(
            "computeEnvironments", ()
        )
    )


def queue(name: str, config: Config, calls: Calls, inputs: Inputs) -> Iterator[Obstacle]:
    """Yields an obstacle if the queue rejects jobs or has no suitable compute environment."""
    found = calls("batch", "DescribeJobQueues", jobQueues=[name]).get("jobQueues", ())
    if not found:
        yield Obstacle(
            f"{name}: the job queue does not exist",
            "run make setup, or set fleet.batch.queue to an existing queue",
        )
        return
    if found[0].get("state") == "DISABLED":
        yield Obstacle(f"{name}: the job queue is disabled", enabling(name))
    if found[0].get("status") == "INVALID":
        why = found[0].get("statusReason", "")
        yield Obstacle(f"{name}: the job queue is invalid: {why}", "make setup")
    yield from _roomy(name, config, environments(calls, found[0]))


def _roomy(name: str, config: Config, found: list[Json]) -> Iterator[Obstacle]:
    """Yields an obstacle if no compute environment can run the job on the configured number of
    nodes.
    """
    unfit = [(one, unfitness(config, one)) for one in found]
    nodes = config.fleet.nodes
    vcpus = node_types.INSTANCE_TYPES[config.fleet.instance_type or ""].vcpus
    fit = [
        int(one["computeResources"].get("maxvCpus", 0)) // vcpus for one, why in unfit if not why
    ]
    if not fit:
        rows = "".join(f"\n    {one['computeEnvironmentName']}: {why}" for one, why in unfit)
        what = f"{name}: no compute environment of the queue can run this job{rows}"
        yield Obstacle(what, "run make setup, or set another fleet.batch.queue")
    elif (most := max(fit)) < nodes:
        what = (
            f"{name}: the job needs {nodes} nodes, but the queue allows {most} (maxvCpus / "
            f"{vcpus} vCPUs per node)"
        )
        yield Obstacle(
            what, f"set NODES={most}" if most else "raise maxvCpus of the compute environment"
        )


def unfitness(config: Config, found: Json) -> str:
    """Returns why a compute environment can't run a multi-node job on the config's instance type,
    or "" if it can.

    https://docs.aws.amazon.com/batch/latest/userguide/mnp-ce.html
    """
    resources, wanted = found.get("computeResources", {}), config.fleet.instance_type or ""
    types = resources.get("instanceTypes", ())
    if found.get("state") == "DISABLED":
        return "it is disabled"
    if found.get("status") == "INVALID":
        return f"it is invalid: {found.get('statusReason', 'no reason given')}"
    if found.get("type") == "UNMANAGED":
        return "it is unmanaged, but multi-node jobs run only on managed ones"
    if resources.get("type") in ("SPOT", "FARGATE", "FARGATE_SPOT"):
        return (
            f"it is of type {resources['type']}, but multi-node jobs run only on EC2 On-Demand "
            "instances"
        )
    if not {wanted, wanted.partition(".")[0], "optimal"} & set(types):
        return f"it has {', '.join(types)}, but not {wanted}"
    return ""
