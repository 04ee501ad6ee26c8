"""Explains why a Batch job is still queued, or why it would stay queued forever.

Uses the status reason that Batch reports for the first job in the queue. Otherwise, checks the
state of the queue and its compute environments. Reason codes and their causes:
https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ..cloud.calls import Calls, Json
from ..cloud.quotas import Obstacle
from ..cloud.template_inputs import Inputs
from ..config import Config
from ..hardware import node_types
from ..trust.errors import CloudError

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
    for environment in environments(calls, queues[0]):
        name = environment["computeEnvironmentName"]
        if environment.get("status") == "INVALID":
            yield (
                f"the compute environment {name} is invalid: "
                f"{environment.get('statusReason', 'no reason given')}"
            )
        if environment.get("state") == "DISABLED":
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


def unfitness(config: Config, environment: Json) -> str:
    """Returns why a compute environment can't run a multi-node job on the config's instance type,
    or "" if it can.

    https://docs.aws.amazon.com/batch/latest/userguide/mnp-ce.html
    """
    resources, wanted = environment.get("computeResources", {}), config.fleet.instance_type or ""
    types = resources.get("instanceTypes", ())
    if environment.get("state") == "DISABLED":
        return "it is disabled"
    if environment.get("status") == "INVALID":
        return f"it is invalid: {environment.get('statusReason', 'no reason given')}"
    if environment.get("type") == "UNMANAGED":
        return "it is unmanaged, but multi-node jobs run only on managed ones"
    if resources.get("type") in ("SPOT", "FARGATE", "FARGATE_SPOT"):
        return (
            f"it is of type {resources['type']}, but multi-node jobs run only on EC2 On-Demand "
            "instances"
        )
    if not {wanted, wanted.partition(".")[0], "optimal"} & set(types):
        return f"it has {', '.join(types)}, but not {wanted}"
    return ""
