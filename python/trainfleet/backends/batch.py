"""AWS Batch backend: runs each job as one multi-node parallel job, on nodes without a shared disk.
The run folder is in S3 (run_storage.py).

SubmitJob is not idempotent, so a retry after a lost response could start a second job. The job name
therefore contains the request token, and `submit` searches for that name before and after
SubmitJob. Any machine with the config can query and stop a job.

Tested: requests against botocore's models, and a fake of Batch that runs real containers
(tests/aws/batch.py). Not tested: Batch itself, EFA in containers, and the ECS agent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..cloud import checks, clock, scheduler_template, spending
from ..cloud.calls import Json
from ..cloud.prices import Prices, by_table
from ..cloud.scheduler_template import DISK
from ..cloud.template_inputs import slug, stack_name, tokenizing_queue
from ..cloud.template_parts import statements
from ..config import Config, Refusals
from ..config.types import Aws
from ..hosts.platform import load_platform
from ..node.entrypoint import AGAIN
from ..node.exit_codes import ELSEWHERE
from ..node.placements import BATCH as PLACEMENT
from ..plan.job import Job, Request, on_its_machines
from ..run.run_folder import Run
from ..trust.errors import CloudError
from ..trust.untrusted_input import show
from . import aws_managed, batch_request
from .aws_managed import ON_REQUEST, Console, Hosted, ManagedMachines, filled
from .base import Handle, Phase, Status
from .batch_request import QueueReasons
from .node_script import TOKEN, artifact, bodies, pairs

GROUP = "/aws/batch/job"  # Batch's default CloudWatch log group
# fleet.aws keys that have no effect if the user provides the queue
OF_THE_STACK = ("zones", "vpc", "subnets", "capacity", "reservation", "ami")
# IAM role of the container → policy statements that it needs; users can provide their own roles
ROLES = {"jobRoleArn": statements, "executionRoleArn": scheduler_template.of_a_start}
AT_ONCE = 100  # maximum number of jobs per DescribeJobs request
GONE = 60.0  # seconds for a terminated job to end after SIGKILL, including the ECS report
# Seconds in which DescribeJobs may not know a new job yet (github.com/apache/airflow/pull/37552)
SEEN_IN = 60.0
PHASES = {
    "SUBMITTED": Phase.QUEUED,
    "PENDING": Phase.QUEUED,
    "RUNNABLE": Phase.QUEUED,
    "STARTING": Phase.STARTING,
    "RUNNING": Phase.RUNNING,
    "SUCCEEDED": Phase.ENDED,
    "FAILED": Phase.ENDED,
}
HOST = re.compile(r"Host EC2 .*terminated", re.IGNORECASE)


class Batch(Hosted):
    """Backend for AWS Batch (base.py)."""

    name, title, placement = "batch", "AWS Batch", PLACEMENT

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gone = GONE + batch_request.grace(config)
        self._sent = dict[str, float]()  # token → time of the submission
        self._waiting = {queue: QueueReasons(lambda: self.calls, queue) for queue in self.queues}

    @property
    def queue(self) -> str:
        return self.config.fleet.batch.queue or stack_name(self.config)

    @property
    def queues(self) -> tuple[str, ...]:
        """Returns the training queue, and the tokenizing queue if the config has separate machines
        for it.
        """
        if self.config.data.tokenize_instance_type:
            return (self.queue, tokenizing_queue(self.config))
        return (self.queue,)

    def _queue_of(self, job: Job) -> str:
        return self.queues[-1] if job.kind == "tokenize" else self.queue

    @staticmethod
    def refuse(config: Config) -> Refusals:
        yield from Batch.lacks(config)
        yield from checks.refuse_of_scheduler(config)
        if config.fleet.spot or config.fleet.aws.capacity == "spot":
            yield (
                "fleet.spot",
                "AWS Batch does not run multi-node parallel jobs on spot instances; set false, or "
                "use ec2 or sagemaker",
            )
        if config.fleet.batch.queue:
            yield from _refuse_beside(config.fleet.batch.queue, config)
        elif not load_platform(config.fleet.platform).ecs:
            yield (
                "fleet.instance_type",
                f"{config.fleet.instance_type}: AWS Batch no longer has a machine image for it; "
                "set fleet.backend: ec2",
            )
        if config.fleet.aws.volume_gib < DISK:
            yield (
                "fleet.aws.volume_gib",
                f"{config.fleet.aws.volume_gib}: too small, because this disk also holds the "
                f"container images; set {DISK} or more",
            )
        if config.fleet.batch.priority is not None and config.fleet.batch.share is None:
            yield "fleet.batch.priority", "applies only within a share; set fleet.batch.share"

    def plan(self, job: Job, without: Mapping[str, str]) -> Request:
        """Returns the requests to register the job definition and submit the job.

        Ignores `without`, because Batch selects the machines.
        """
        secrets = aws_managed.references(self.config, job.secrets)
        config = on_its_machines(self.config, job)
        what = batch_request.definition(config, job, job.image, secrets)
        how = batch_request.submission(config, job, self._queue_of(job), what["jobDefinitionName"])
        return Request(
            job,
            (
                artifact(1, "batch", "RegisterJobDefinition", what),
                artifact(2, "batch", "SubmitJob", how),
            ),
        )

    def submit(self, request: Request) -> Handle:
        """Submits a job after checking that it can run.

        If the request's token already has a job, returns that job instead.

        Raises:
            BackendError: the job can't run. The message says why.
        """
        name = self._name(request)
        if there := self._named(name):
            return self._handle(request, there)
        what, how = bodies(request)
        self._require(request.job, what["nodeProperties"]["nodeRangeProperties"][0]["container"])
        aws_managed.keep(self.calls, self.config, request.job.secrets)
        what = filled(self.machines().own, what)
        known = self.calls(
            "batch",
            "DescribeJobDefinitions",
            jobDefinitionName=what["jobDefinitionName"],
            status="ACTIVE",
        )
        if not known.get("jobDefinitions"):
            self.calls("batch", "RegisterJobDefinition", **what)
        override = how["nodeOverrides"]["nodePropertyOverrides"][0]["containerOverrides"]
        override["environment"] += pairs(request.environment)
        made = self.calls("batch", "SubmitJob", jobName=name, **how)
        self._sent[request.token] = clock.now()
        return self._handle(request, self._named(name) or [made])

    def _require(self, job: Job, container: Mapping[str, Any]) -> None:
        """Raises CloudError if Batch could not run the job in its container."""
        roles = [
            partial(checks.role, arn, "ecs-tasks.amazonaws.com", allowed)
            for key, allowed in ROLES.items()
            if (arn := container.get(key, "")).startswith("arn:")
        ]
        queue = partial(batch_request.queue, self._queue_of(job))
        self.require(on_its_machines(self.config, job), job, queue, *roles)

    def _name(self, request: Request) -> str:
        return f"{slug(self.config.name, 60)}-{request.job.kind}-{request.token}"

    def _named(self, name: str) -> list[Json]:
        """Returns the jobs with this name, oldest first.

        A trailing * in `name` matches any suffix.
        """
        return sorted(
            (job for queue in self.queues for job in self._listed(queue, name)),
            key=lambda job: job["createdAt"],
        )

    def _listed(self, queue: str, name: str) -> list[Json]:
        only = [{"name": "JOB_NAME", "values": [name]}]
        try:
            return list(
                self.calls.pages(
                    "batch", "ListJobs", "jobSummaryList", jobQueue=queue, filters=only
                )
            )
        except CloudError as error:
            if error.code == "ClientException" and "not found" in error.why:
                return []  # a nonexistent queue has no jobs
            raise

    def _handle(self, request: Request, jobs: list[Json]) -> Handle:
        """Returns the handle of the oldest job, and terminates duplicates from retried requests."""
        for job in jobs[1:]:
            self.calls(
                "batch",
                "TerminateJob",
                jobId=job["jobId"],
                reason="the same request was sent twice",
            )
        return Handle(self.name, str(jobs[0]["jobId"]), request.token, request.job.nodes)

    def pace(self, handle: Handle) -> float:
        # DescribeJobs accepts at most AT_ONCE jobs per request, so larger jobs are polled less
        # often
        return aws_managed.PACE * max(1.0, handle.nodes / AT_ONCE)

    def look(self, handle: Handle) -> Status:
        jobs = self._described(handle)
        job = jobs.get(handle.id)
        if job is None or not str(job["jobName"]).endswith(handle.token):
            # Batch deletes job records a week after the job ends.
            is_new = clock.now() - self._sent.get(handle.token, -SEEN_IN) < SEEN_IN
            return Status(Phase.QUEUED if is_new else Phase.ENDED)
        parts = {
            node: part for node in range(handle.nodes) if (part := jobs.get(f"{handle.id}#{node}"))
        }
        return status_of(job, parts, self._why(job))

    def _why(self, job: Json) -> str:
        """Returns why the job is still queued, as reported by its queue."""
        queue = next(
            (queue for queue in self.queues if str(job.get("jobQueue")).endswith(queue)), self.queue
        )
        return self._waiting[queue].why(job)

    def _described(self, handle: Handle) -> dict[str, Json]:
        """Returns the records of the job and its nodes, by ID."""
        ids = (
            [handle.id, *(f"{handle.id}#{node}" for node in range(handle.nodes))]
            if handle.id
            else []
        )
        found = dict[str, Json]()
        for first in range(0, len(ids), AT_ONCE):
            answer = self.calls("batch", "DescribeJobs", jobs=ids[first : first + AT_ONCE])
            found |= {str(job["jobId"]): job for job in answer.get("jobs", ())}
        return found

    def console(self, handle: Handle) -> Console | None:
        jobs = self._described(handle)
        job = jobs.get(handle.id, {})
        if not job.get("startedAt"):
            return None
        logging = job["nodeProperties"]["nodeRangeProperties"][0]["container"].get(
            "logConfiguration", {}
        )
        found = {
            node: jobs.get(f"{handle.id}#{node}", {}).get("container", {})
            for node in range(handle.nodes)
        }
        streams = {
            node: str(part["logStreamName"])
            for node, part in found.items()
            if part.get("logStreamName")
        }
        group = str(logging.get("options", {}).get("awslogs-group", GROUP))
        return Console(
            job["startedAt"] / 1000, PHASES[job["status"]] is Phase.ENDED, group, streams
        )

    def end(self, handle: Handle) -> str:
        self.calls("batch", "TerminateJob", jobId=handle.id, reason="asked to stop by trainfleet")
        return f"aws batch describe-jobs --jobs {handle.id}"

    def find(self, run: Run) -> Handle:
        """Returns the run's newest active job, or its newest job if none are active."""
        named = rf"{re.escape(slug(run.name, 60))}-(train|tokenize)-{TOKEN}"
        mine = [
            job
            for job in self._named(f"{slug(run.name, 60)}-*")
            if re.fullmatch(named, job["jobName"])
        ]
        newest = max(
            mine,
            key=lambda job: (PHASES[job["status"]] is not Phase.ENDED, job["createdAt"]),
            default=None,
        )
        if newest is None:
            return Handle(self.name, "", "", 0)
        nodes = int(newest.get("nodeProperties", {}).get("numNodes", 1))
        return Handle(self.name, str(newest["jobId"]), str(newest["jobName"])[-16:], nodes)

    def machines(self) -> ManagedMachines:
        own = self.config.fleet.batch
        needed = not (own.queue and own.job_role and own.execution_role)
        return ManagedMachines(self.config, self.name, needed, self.costs, self._notes)

    def _notes(self) -> list[str]:
        return [
            *spending.of_tokenizing(self.config, by_table()),
            "",
            "stop",
            *self.stopping(batch_request.grace(self.config)),
        ]

    def costs(self, config: Config, prices: Prices) -> spending.Spending:
        return spending.of_batch(config, prices)


def _refuse_beside(queue: str, config: Config) -> Refusals:
    """Yields an error for each setting that has no effect on a user-provided queue."""
    region = config.fleet.aws.region
    if ":" in queue and region and queue.split(":")[3] != region:
        yield (
            "fleet.batch.queue",
            f"{queue} is not in fleet.aws.region {region}; set a queue in that region",
        )
    for key in OF_THE_STACK:
        if (value := getattr(config.fleet.aws, key)) != getattr(Aws, key):
            what = f"{show(value)}: fleet.batch.queue {queue} has its own machines; remove it"
            yield f"fleet.aws.{key}", what
    if config.data.tokenize_instance_type:
        what = (
            f"{config.data.tokenize_instance_type}: setup creates no tokenizing queue if "
            "fleet.batch.queue is set; remove it"
        )
        yield "data.tokenize_instance_type", what


def status_of(job: Json, parts: Mapping[int, Json], waits: str) -> Status:
    """Converts DescribeJobs records of a job and its nodes to a status.

    `waits` explains why the job is still queued. Exit codes are omitted if Batch will retry the
    job.
    """
    phase, attempts = PHASES[job["status"]], len(job.get("attempts", ()))
    containers = [part.get("container", {}) for part in parts.values()]
    hosts = tuple(
        cards[0].get("privateIpv4Address", "")
        for container in containers
        if (cards := container.get("networkInterfaces"))
    )
    if phase is not Phase.ENDED:
        if phase is Phase.RUNNING and _asked(job):
            phase = Phase.STOPPING
        words = waits if phase is Phase.QUEUED else ""
        return Status(phase, words, attempts + 1, hosts=hosts)
    exits, lost = _outcome(job, parts)
    why = job.get("statusReason", "")
    if job.get("isTerminated"):
        why = f"{ON_REQUEST}: {why}"
    said = filter(None, [why, *(container.get("reason") for container in containers)])
    words = "\n".join(dict.fromkeys(said))
    return Status(phase, words, attempts or 1, exits, lost, hosts, ended_by=why * _asked(job))


def _outcome(job: Json, parts: Mapping[int, Json]) -> tuple[dict[int, int], dict[int, str]]:
    """Returns the exit codes of an ended job's nodes, and why the others were lost.

    A node that never ran has exit code 1 if Batch marked it as failed, otherwise 0.
    """
    exits, lost = dict[int, int](), dict[int, str]()
    for node, part in parts.items():
        if HOST.search(why := part.get("statusReason", "")):
            lost[node] = why
        else:
            failed = part.get("status") == "FAILED" and not _asked(part)
            exits[node] = int(part.get("container", {}).get("exitCode", failed))
    # the main node only propagated another node's failure
    if exits.get(0) in (ELSEWHERE, AGAIN) and (lost or any((exits | {0: 0}).values())):
        exits[0] = 0
    if job["status"] == "FAILED" and not (lost or any(exits.values()) or _asked(job)):
        exits[0] = 1
    return exits, lost


def _asked(job: Json) -> bool:
    return bool(job.get("isTerminated") or job.get("isCancelled"))
