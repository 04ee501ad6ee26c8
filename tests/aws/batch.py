"""AWS Batch in the pretended account: queues, environments, job definitions, and multi-node jobs whose containers really run.

    batch = Batch(account, containers)
    batch.runnable = 1.0            seconds that a job waits in RUNNABLE; less than 0: for ever
    batch.stuck = "CAPACITY:..."    its statusReason meanwhile
    batch.late = 2.0                seconds between the main node's start and the children's
    batch.fails_to_start = "..."    a reason with which no container starts, such as CannotPullContainerError
    containers.lose(job, 1)         the machine of node 1 goes: `Host EC2 (instance i-...) terminated.`

As Batch documents it (docs.aws.amazon.com/batch/latest/userguide: multi-node-parallel-jobs, job_retries, job_timeouts, job_env_vars):
the main node starts first and decides how the job ends; a child that dies ends nothing; when the main node ends, the children are
stopped; a retry strategy looks at the main node alone, and none of its conditions met means another attempt.
"""

from __future__ import annotations

import copy
import fnmatch
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import resources
from .account import Account, Refused, Thing, answers
from .containers import Container, Containers

SIZE = 30 * 1024  # bytes of a submission
FINAL = ("SUCCEEDED", "FAILED")


@dataclass
class Node:
    """A node in the newest attempt."""

    status: str = "SUBMITTED"
    reason: str = ""
    container: Container | None = None
    instance: str = ""

    def exit_code(self) -> int | None:
        return None if self.container is None or self.container.lost else self.container.code


@dataclass
class Job:
    id: str
    name: str
    queue: str
    definition: dict[str, Any]
    request: dict[str, Any]
    nodes: list[Node]
    status: str = "SUBMITTED"
    reason: str = ""
    created: float = field(default_factory=time.time)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    asked: str = ""  # the reason of TerminateJob
    started: float = 0.0  # when the newest attempt's main node began

    @property
    def ended(self) -> bool:
        return self.status in FINAL


class Batch:
    """The service's jobs. `account.batch` is how the answers below find it."""

    def __init__(self, account: Account, containers: Containers) -> None:
        self.account, self.containers = account, containers
        self.jobs: dict[str, Job] = {}
        self.definitions: dict[str, list[dict[str, Any]]] = {}
        self.runnable, self.stuck, self.late, self.fails_to_start = 0.2, "", 0.0, ""
        self.closing = threading.Event()
        self.lock = threading.RLock()
        account.batch = self  # type: ignore[attr-defined]

    def queue_of_mine(self, name: str, instance_type: str, vcpus: int, **more: Any) -> None:
        """A queue and an environment that a user has made; `more` replaces keys of the environment."""
        resources = {
            "type": "EC2",
            "minvCpus": 0,
            "maxvCpus": vcpus,
            "instanceTypes": [instance_type],
            "subnets": ["subnet-1"],
        }
        environment = {
            "computeEnvironmentName": f"{name}-ce",
            "type": "MANAGED",
            "state": "ENABLED",
            "status": "VALID",
        } | more
        self.account.add(
            "compute-environment", f"{name}-ce", {"computeResources": resources} | environment, {}
        )
        self.account.add(
            "job-queue",
            name,
            {"state": "ENABLED", "status": "VALID", "environments": [f"{name}-ce"]},
            {},
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        """As it is where no container runs: jobs that a test has written down."""
        assert self.containers is None
        copied = Batch(copy.deepcopy(self.account, memo), self.containers)
        copied.jobs, copied.definitions = (
            copy.deepcopy(self.jobs, memo),
            copy.deepcopy(self.definitions, memo),
        )
        return copied

    def close(self) -> None:
        self.closing.set()
        for job in self.jobs.values():
            self.thread(job).join()

    def thread(self, job: Job) -> threading.Thread:
        return self.containers.cluster.threads[job.id]

    # A job's way

    def run(self, job: Job) -> None:
        job.status, since = "RUNNABLE", time.monotonic()
        while (
            self.runnable < 0 or time.monotonic() - since < self.runnable or not self.has_room(job)
        ):
            job.reason = self.stuck
            if job.asked or self.closing.wait(0.02):
                return self.end(job, "FAILED", job.asked)
        limit = job.request.get("retryStrategy", job.definition.get("retryStrategy", {}))
        for attempt in range(1, limit.get("attempts", 1) + 1):
            job.status, job.reason, began = "STARTING", "", time.time()
            self.attempt(job, attempt)
            main = job.nodes[0]
            job.attempts.append(self.record(job, 0, began))
            if main.exit_code() == 0:
                return self.end(job, "SUCCEEDED", "Essential container in task exited")
            job.reason = main.reason
            if job.asked or self.closing.is_set() or not again(limit, main):
                break
        return self.end(job, "FAILED", job.asked or job.reason)

    def has_room(self, job: Job) -> bool:
        """Whether the job's machines fit beside those of others, which then are its own."""
        with self.lock:
            active = [
                one for one in list(self.jobs.values()) if one.status in ("STARTING", "RUNNING")
            ]
            nodes = sum(len(one.nodes) for one in (*active, job))
            if room := nodes <= self.containers.cluster.most:
                job.status = "STARTING"
            return room

    def attempt(self, job: Job, number: int) -> None:
        job.nodes = [Node() for _ in job.nodes]
        began = time.monotonic()
        timeout = job.definition.get("timeout", {}).get("attemptDurationSeconds")
        while True:
            running = [node for node in job.nodes if node.container and node.container.code is None]
            started = job.nodes[0].container is not None or job.nodes[0].status == "FAILED"
            for index, node in enumerate(job.nodes):
                if (
                    not node.container
                    and node.status != "FAILED"
                    and (index == 0 or (started and time.monotonic() - began > self.late))
                ):
                    self.launch(job, index, number)
                    running.append(node)
            self.note(job)
            main = job.nodes[0]
            over = (
                main.status in FINAL
                or job.asked
                or self.closing.is_set()
                or (timeout and time.monotonic() - began > timeout)
            )
            if timeout and time.monotonic() - began > timeout and not job.asked:
                main.reason = "Job attempt duration exceeded timeout"
            if over:
                for node in running:
                    if node.container:
                        self.containers.terminate(node.container)
            if main.status in FINAL and not running:
                return
            time.sleep(0.03)

    def launch(self, job: Job, index: int, attempt: int) -> None:
        node = job.nodes[index]
        node.instance = f"i-{uuid.uuid4().hex[:17]}"
        if self.fails_to_start:
            node.status, node.reason = "FAILED", "Task failed to start"
            return
        with self.lock:  # networks are entered one at a time
            node.container = self.containers.start(
                job.id, attempt, index, len(job.nodes), *self.told(job, index, attempt)
            )
            options = self.container_of(job).get("logConfiguration", {}).get("options", {})
            node.container.group = options.get("awslogs-group", "/aws/batch/job")
            node.container.stream = f"{job.definition['jobDefinitionName']}/default/{node.container.mark.replace('/', '-')}"
        node.status = "RUNNING"
        job.started = job.started if index else time.time()

    def container_of(self, job: Job) -> dict[str, Any]:
        container: dict[str, Any] = job.definition["nodeProperties"]["nodeRangeProperties"][0][
            "container"
        ]
        return container

    def told(self, job: Job, index: int, attempt: int) -> tuple[list[str], dict[str, str]]:
        """The words and the environment of a node's container."""
        definition = self.container_of(job)
        override = (
            job.request.get("nodeOverrides", {})
            .get("nodePropertyOverrides", [{}])[0]
            .get("containerOverrides", {})
        )
        environment = {
            pair["name"]: pair["value"]
            for given in (definition, override)
            for pair in given.get("environment", ())
        }
        for secret in definition.get("secrets", ()):
            value = self.account.respond(
                self.account.region,
                "ssm",
                "GetParameter",
                {"Name": secret["valueFrom"], "WithDecryption": True},
            )
            environment[secret["name"]] = value["Parameter"]["Value"]
        own = {
            "AWS_BATCH_JOB_ID": f"{job.id}#{index}", "AWS_BATCH_JQ_NAME": job.queue, "AWS_BATCH_JOB_ATTEMPT": str(attempt),
            "AWS_BATCH_JOB_NUM_NODES": str(len(job.nodes)), "AWS_BATCH_JOB_NODE_INDEX": str(index), "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        }  # fmt: skip
        if index:
            own["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = self.containers.cluster.address(0)
        assert not any(name.startswith("AWS_BATCH") for name in environment), (
            "Batch refuses such names"
        )
        return override.get("command") or definition.get("command", []), environment | own

    def note(self, job: Job) -> None:
        """What Batch sees of its nodes."""
        for node in job.nodes:
            if node.status == "RUNNING" and node.container and node.container.code is not None:
                self.containers.kill(node.container)
                node.status = "SUCCEEDED" if node.exit_code() == 0 else "FAILED"
                node.reason = (
                    f"Host EC2 (instance {node.instance}) terminated."
                    if node.container.lost
                    else "Essential container in task exited"
                )
        if job.status not in FINAL and job.nodes[0].status == "RUNNING":
            job.status = "RUNNING"

    def end(self, job: Job, status: str, reason: str) -> None:
        job.reason, job.status = reason, status

    # What it says

    def record(self, job: Job, index: int, began: float) -> dict[str, Any]:
        return {
            "container": self.container(job, index),
            "startedAt": int(began * 1000),
            "stoppedAt": int(time.time() * 1000),
            "statusReason": job.nodes[index].reason,
        }

    def container(self, job: Job, index: int) -> dict[str, Any]:
        node = job.nodes[index]
        record: dict[str, Any] = {
            "taskArn": f"arn:aws:ecs:{self.account.region}:{self.account.number}:task/c/{job.id}{index}"
        }
        if node.container:
            record["logStreamName"] = node.container.stream
            record["networkInterfaces"] = [
                {"attachmentId": "a", "privateIpv4Address": self.containers.cluster.address(index)}
            ]
        if (code := node.exit_code()) is not None:
            record["exitCode"] = code
        if self.fails_to_start and node.status == "FAILED":
            record["reason"] = self.fails_to_start
        return record

    def detail(self, job: Job, index: int | None) -> dict[str, Any]:
        common = {"jobName": job.name, "jobQueue": f"arn:aws:batch:{self.account.region}:{self.account.number}:job-queue/{job.queue}",
                  "createdAt": int(job.created * 1000), "jobDefinition": job.definition["jobDefinitionName"],
                  **({"startedAt": int(job.started * 1000)} if job.started else {}), "tags": job.request.get("tags", {}), "isTerminated": bool(job.asked), "isCancelled": False}  # fmt: skip
        if index is None:
            return {**common, "jobId": job.id, "status": job.status, "statusReason": job.reason, "attempts": list(job.attempts),
                    "nodeProperties": {**job.definition["nodeProperties"], "numNodes": len(job.nodes)}}  # fmt: skip
        node = job.nodes[index]
        status = "FAILED" if job.ended and node.status not in FINAL else node.status
        return {**common, "jobId": f"{job.id}#{index}", "status": status, "statusReason": node.reason, "container": self.container(job, index),
                "nodeDetails": {"nodeIndex": index, "isMainNode": index == 0}}  # fmt: skip


def again(strategy: Mapping[str, Any], main: Node) -> bool:
    """Whether a retry strategy has the job tried again, as its main node ended."""
    code = main.exit_code()
    for rule in strategy.get("evaluateOnExit", ()):
        told = {
            "onExitCode": "" if code is None else str(code),
            "onStatusReason": main.reason,
            "onReason": "",
        }
        if all(
            fnmatch.fnmatch(told[key].lower(), pattern.lower())
            for key, pattern in rule.items()
            if key != "action"
        ):
            return bool(rule["action"].upper() == "RETRY")
    return True


def service(account: Account) -> Batch:
    """The account's Batch; one that can start no containers where a test has made none."""
    if not hasattr(account, "batch"):
        Batch(account, None)  # type: ignore[arg-type]
    return account.batch  # type: ignore[attr-defined,no-any-return]


# What CloudFormation makes of its types


def _make_environment(
    account: Account,
    stack: str,
    logical: str,
    properties: Mapping[str, Any],
    tags: Mapping[str, str],
) -> str:
    name = properties["ComputeEnvironmentName"]
    if name in account.things:
        raise Refused("AlreadyExists", f"Object already exists: {name}")
    given = properties["ComputeResources"]
    resources = {key[0].lower() + key[1:]: value for key, value in given.items()} | {
        "maxvCpus": given["MaxvCpus"]
    }
    state = {
        "type": properties["Type"],
        "state": "ENABLED",
        "status": "VALID",
        "computeResources": resources,
    }
    account.add("compute-environment", name, state, tags, stack)
    return name


def _make_queue(
    account: Account,
    stack: str,
    logical: str,
    properties: Mapping[str, Any],
    tags: Mapping[str, str],
) -> str:
    name = properties["JobQueueName"]
    if name in account.things:
        raise Refused("AlreadyExists", f"Object already exists: {name}")
    order = [entry["ComputeEnvironment"] for entry in properties["ComputeEnvironmentOrder"]]
    account.add(
        "job-queue",
        name,
        {"state": "ENABLED", "status": "VALID", "environments": order},
        tags,
        stack,
    )
    return name


def _remove(account: Account, name: str) -> bool:
    """As CloudFormation does: it disables first, by itself."""
    if any(name in thing.properties.get("environments", ()) for thing in account.of("job-queue")):
        raise Refused("ClientException", "Cannot delete, found existing JobQueue relationship")
    account.things.pop(name, None)
    return True


resources.MAKERS |= {
    "AWS::Batch::ComputeEnvironment": _make_environment,
    "AWS::Batch::JobQueue": _make_queue,
}
resources.REMOVERS |= {"AWS::Batch::ComputeEnvironment": _remove, "AWS::Batch::JobQueue": _remove}


def queue(account: Account, name: str) -> Thing:
    found = account.things.get(name.rpartition("/")[2])
    if found is None or found.kind != "job-queue":
        raise Refused("ClientException", f"JobQueue {name} not found.")
    return found


@answers("batch", "RegisterJobDefinition")
def _register(account: Account, **request: Any) -> dict[str, Any]:
    batch, name = service(account), request["jobDefinitionName"]
    nodes = request["nodeProperties"]
    if len(nodes["nodeRangeProperties"]) > 5:
        raise Refused("ClientException", "Number of node groups should not be more than 5")
    if len(request.get("retryStrategy", {}).get("evaluateOnExit", ())) > 5:
        raise Refused("ClientException", "At most 5 evaluateOnExit conditions are allowed")
    for part in nodes["nodeRangeProperties"]:
        if not part["container"].get("image"):
            raise Refused(
                "ClientException",
                "Error executing request, Exception : Container image is required",
            )
    revisions = batch.definitions.setdefault(name, [])
    revisions.append(request | {"status": "ACTIVE", "revision": len(revisions) + 1})
    arn = f"arn:aws:batch:{account.region}:{account.number}:job-definition/{name}:{len(revisions)}"
    account.add("job-definition", arn, {"jobDefinitionName": name}, request.get("tags", {}))
    return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": len(revisions)}


@answers("batch", "DescribeJobDefinitions")
def _definitions(
    account: Account, jobDefinitionName: str = "", status: str = "", **_: Any
) -> dict[str, Any]:
    arn = f"arn:aws:batch:{account.region}:{account.number}:job-definition"
    found = [
        {"jobDefinitionName": name, "jobDefinitionArn": f"{arn}/{name}:{one['revision']}", "revision": one["revision"], "type": "multinode",
         "status": one["status"], "tags": one.get("tags", {})}
        for name, revisions in service(account).definitions.items() for one in revisions
        if jobDefinitionName in ("", name) and status in ("", one["status"])
    ]  # fmt: skip
    return {"jobDefinitions": found}


@answers("batch", "DeregisterJobDefinition")
def _deregister(account: Account, jobDefinition: str) -> dict[str, Any]:
    name, _, revision = jobDefinition.rpartition("/")[2].partition(":")
    service(account).definitions[name][int(revision) - 1]["status"] = "INACTIVE"
    account.things.pop(jobDefinition, None)
    return {}


@answers("batch", "SubmitJob")
def _submit(account: Account, **request: Any) -> dict[str, Any]:
    import json

    batch, place = service(account), queue(account, request["jobQueue"])
    if place.properties["state"] != "ENABLED" or place.properties["status"] != "VALID":
        raise Refused("ClientException", f"JobQueue {place.id} is not in a valid state")
    if len(json.dumps(request)) > SIZE:
        raise Refused("ClientException", "Request must be smaller than or equal to 30720 bytes")
    revisions = [
        one
        for one in batch.definitions.get(request["jobDefinition"].partition(":")[0], ())
        if one["status"] == "ACTIVE"
    ]
    if not revisions:
        raise Refused("ClientException", f"JobDefinition {request['jobDefinition']} not found.")
    nodes = (
        request.get("nodeOverrides", {}).get("numNodes")
        or revisions[-1]["nodeProperties"]["numNodes"]
    )
    job = Job(
        str(uuid.uuid4()),
        request["jobName"],
        place.id,
        revisions[-1],
        request,
        [Node() for _ in range(nodes)],
    )
    batch.jobs[job.id] = job
    if batch.containers is not None:
        thread = batch.containers.cluster.threads[job.id] = threading.Thread(
            target=batch.run, args=(job,), daemon=True
        )
        thread.start()
    return {
        "jobName": job.name,
        "jobId": job.id,
        "jobArn": f"arn:aws:batch:{account.region}:{account.number}:job/{job.id}",
    }


@answers("batch", "ListJobs")
def _list(
    account: Account, jobQueue: str, filters: Any = (), jobStatus: str = "", **_: Any
) -> dict[str, Any]:
    place = queue(account, jobQueue)
    names = [value for one in filters if one["name"] == "JOB_NAME" for value in one["values"]]
    jobs = [job for job in service(account).jobs.values() if job.queue == place.id]
    if names:
        jobs = [
            job
            for job in jobs
            if any(fnmatch.fnmatch(job.name.lower(), name.lower()) for name in names)
        ]
    else:
        jobs = [job for job in jobs if job.status == (jobStatus or "RUNNING")]
    return {"jobSummaryList": [
        {"jobId": job.id, "jobName": job.name, "createdAt": int(job.created * 1000), "status": job.status, "nodeProperties": {"numNodes": len(job.nodes)}}
        for job in sorted(jobs, key=lambda job: -job.created)
    ]}  # fmt: skip


@answers("batch", "DescribeJobs")
def _describe(account: Account, jobs: list[str]) -> dict[str, Any]:
    if len(jobs) > 100:
        raise Refused(
            "ClientException", "Error executing request, Exception : Jobs can't be more than 100"
        )
    found = []
    for id in jobs:
        whole, _, index = id.partition("#")
        job = service(account).jobs.get(whole)
        if job and (not index or (int(index) < len(job.nodes) and job.status != "RUNNABLE")):
            found.append(service(account).detail(job, int(index) if index else None))
    return {"jobs": found}


@answers("batch", "TerminateJob")
def _terminate(account: Account, jobId: str, reason: str) -> dict[str, Any]:
    if (job := service(account).jobs.get(jobId)) and not job.ended:
        job.asked = reason
        if service(account).containers is None:  # nobody follows what a test has written down
            account.later(30.0, lambda: service(account).end(job, "FAILED", reason))
    return {}


@answers("batch", "DescribeJobQueues")
def _queues(account: Account, jobQueues: list[str] = (), **_: Any) -> dict[str, Any]:  # type: ignore[assignment]
    names = [name.rpartition("/")[2] for name in jobQueues]
    return {"jobQueues": [
        {"jobQueueName": thing.id, "jobQueueArn": f"arn:aws:batch:{account.region}:{account.number}:job-queue/{thing.id}", "tags": thing.tags,
         "state": thing.properties["state"], "status": thing.properties["status"], "priority": 1, "statusReason": thing.properties.get("statusReason", ""),
         "computeEnvironmentOrder": [{"order": order, "computeEnvironment": name} for order, name in enumerate(thing.properties["environments"])]}
        for thing in account.of("job-queue") if not names or thing.id in names
    ]}  # fmt: skip


@answers("batch", "DescribeComputeEnvironments")
def _environments(
    account: Account, computeEnvironments: list[str] = (), **_: Any
) -> dict[str, Any]:  # type: ignore[assignment]
    names = [name.rpartition("/")[2] for name in computeEnvironments]
    found = [thing for thing in account.of("compute-environment") if not names or thing.id in names]
    return {
        "computeEnvironments": [
            {"computeEnvironmentName": thing.id, "tags": thing.tags, **thing.properties}
            for thing in found
        ]
    }


def _update(kind: str, key: str) -> None:
    @answers("batch", f"Update{kind}")
    def answer(account: Account, **request: Any) -> dict[str, Any]:
        thing = account.things[request[key].rpartition("/")[2]]
        thing.properties["state"] = request.get("state", thing.properties["state"])
        thing.properties["status"] = "UPDATING"
        account.later(4.0, lambda: thing.properties.update(status="VALID"))
        return {}

    @answers("batch", f"Delete{kind}")
    def delete(account: Account, **request: Any) -> dict[str, Any]:
        name = request[key].rpartition("/")[2]
        thing = account.things.get(name)
        if thing is None:
            return {}
        if thing.properties["status"] == "UPDATING":
            raise Refused("ClientException", "Cannot delete, resource is being modified.")
        if thing.properties["state"] == "ENABLED":
            raise Refused("ClientException", "Cannot delete, state is not DISABLED")
        _remove(account, name)
        return {}


_update("JobQueue", "jobQueue")
_update("ComputeEnvironment", "computeEnvironment")
