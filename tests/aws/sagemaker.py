"""SageMaker training jobs in the pretended account, whose containers really run.

    sagemaker = SageMaker(account, containers)
    sagemaker.waits = 0.5                     seconds in each of Starting, Downloading
    sagemaker.fails = "CapacityError: ..."    the FailureReason of a job that gets no machines
    sagemaker.interrupt(name)                 managed spot: the machines are taken away, the job starts again
    sagemaker.break_host(name, 1)             a host's hardware fails: InternalServerError, and a retry where RetryStrategy allows

As SageMaker documents it (docs.aws.amazon.com/sagemaker/latest: API_DescribeTrainingJob, your-algorithms-training-algo-*,
API_StopTrainingJob): one container a host, whose /opt/ml says who is there; the first that fails fails the job, its
/opt/ml/output/failure becomes FailureReason; a stop is SIGTERM, and SIGKILL after the grace. A name is taken once. There is no
queue: what exceeds the quota beside the jobs that have not ended is refused (API_CreateTrainingJob, ResourceLimitExceeded).
"""

from __future__ import annotations

import copy
import datetime
import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .account import Account, Refused, answers, tag_list
from .containers import Container, Containers

FINAL = ("Completed", "Failed", "Stopped")


@dataclass
class Job:
    name: str
    request: dict[str, Any]
    status: str = "InProgress"
    second: str = "Starting"
    reason: str = ""
    created: float = field(default_factory=time.time)
    transitions: list[dict[str, Any]] = field(default_factory=list)
    containers: list[Container] = field(default_factory=list)
    asked: bool = False
    broken: str = ""  # interrupted, or hardware
    attempt: int = 0
    started: datetime.datetime | None = None  # when its containers began first
    warm: str = ""  # the status of its warm pool

    @property
    def hosts(self) -> list[str]:
        return [
            f"algo-{number + 1}"
            for number in range(self.request["ResourceConfig"]["InstanceCount"])
        ]

    def go(self, second: str, message: str = "") -> None:
        self.second = second
        self.transitions.append({"Status": second, "StartTime": moment(), "StatusMessage": message})


def moment() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class SageMaker:
    """The service's jobs. `account.sagemaker` is how the answers below find it."""

    def __init__(self, account: Account, containers: Containers) -> None:
        self.account, self.containers = account, containers
        self.jobs: dict[str, Job] = {}
        self.waits, self.fails = 0.1, ""
        self.closing = threading.Event()
        self.lock = threading.Lock()
        account.sagemaker = self  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> SageMaker:
        """As it is where no container runs: jobs that a test has written down."""
        assert self.containers is None
        copied = SageMaker(copy.deepcopy(self.account, memo), self.containers)
        copied.jobs = copy.deepcopy(self.jobs, memo)
        return copied

    def close(self) -> None:
        self.closing.set()
        for name in self.jobs:
            self.containers.cluster.threads[name].join()

    def interrupt(self, name: str) -> None:
        self.jobs[name].broken = "interrupted"

    def break_host(self, name: str, host: int) -> None:
        self.jobs[name].broken = "hardware"
        self.containers.lose(name, host)

    def run(self, job: Job) -> None:
        retries = job.request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0)
        while True:
            job.go("Starting", "Starting the training job")
            if self.rest(job) or self.fails:
                break
            job.go("Downloading", "Downloading the training image")
            if self.rest(job):
                break
            job.broken, job.attempt = "", job.attempt + 1
            job.go("Training", "Training image download completed. Training in progress.")
            self.train(job)
            if job.asked or not job.broken:
                break
            if job.broken == "interrupted":
                job.go("Interrupted", "The spot instances were interrupted")
                continue
            if retries == 0:
                return self.end(
                    job,
                    "Failed",
                    "Failed",
                    "InternalServerError: We encountered an internal error. Please try again.",
                )
            retries -= 1
            job.go("Restarting", "Restarting the training job")
        self.conclude(job)

    def rest(self, job: Job) -> bool:
        """Waits in a state; whether the job was stopped meanwhile."""
        until = time.monotonic() + self.waits
        while time.monotonic() < until or self.waits < 0:
            if job.asked or self.closing.wait(0.02):
                return True
        return job.asked

    def conclude(self, job: Job) -> None:
        if self.fails and not job.containers:
            return self.end(job, "Failed", "Failed", self.fails)
        failed = [
            (host, container) for host, container in enumerate(job.containers) if container.code
        ]
        if job.asked or self.closing.is_set():
            return self.end(job, "Stopped", "Stopped", "")
        if not failed:
            job.go("Uploading", "Uploading generated training model")
            return self.end(job, "Completed", "Completed", "")
        host, container = min(failed, key=lambda entry: entry[1].asked or 0.0)
        said = ""
        with suppress(FileNotFoundError):
            said = (self.ml(job, host) / "output/failure").read_text()[:1024]
        return self.end(
            job, "Failed", "Failed", f"AlgorithmError: {said}, exit code: {container.code}"
        )

    def end(self, job: Job, status: str, second: str, reason: str) -> None:
        job.reason = reason
        job.go(second)
        job.status = status

    def train(self, job: Job) -> None:
        job.containers, job.started = [], job.started or moment()
        for host in range(len(job.hosts)):
            with self.lock:
                job.containers.append(self.start(job, host))
        limit = time.monotonic() + job.request["StoppingCondition"]["MaxRuntimeInSeconds"]
        while any(container.code is None for container in job.containers):
            failed = any(container.code for container in job.containers)
            if (
                job.asked
                or job.broken
                or failed
                or self.closing.is_set()
                or time.monotonic() > limit
            ):
                for container in job.containers:
                    self.containers.terminate(container)
            time.sleep(0.03)
        for container in job.containers:
            self.containers.kill(container)

    def ml(self, job: Job, host: int) -> Path:
        return self.containers.cluster.folder / "ml" / job.name / f"{job.attempt}-{host}"

    def start(self, job: Job, host: int) -> Container:
        """A host's container: /opt/ml as SageMaker lays it out, the hosts' names, and no exit code of any attempt before."""
        folder, cluster, specification = (
            self.ml(job, host),
            self.containers.cluster,
            job.request["AlgorithmSpecification"],
        )
        for inner in ("input/config", "input/data", "output", "model"):
            (folder / inner).mkdir(parents=True)
        resources = {
            "current_host": job.hosts[host],
            "hosts": job.hosts,
            "network_interface_name": "eth0",
        }
        (folder / "input/config/resourceconfig.json").write_text(json.dumps(resources))
        (folder / "input/config/hyperparameters.json").write_text(
            json.dumps(job.request.get("HyperParameters", {}))
        )
        names = "".join(
            f"{cluster.address(number)} {name}\n" for number, name in enumerate(job.hosts)
        )
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        for channel in job.request.get("InputDataConfig", ()):
            self.fetch(channel, folder / "input/data" / channel["ChannelName"])
        told = {"TRAINING_JOB_NAME": job.name, **job.request.get("Environment", {})}
        words = specification.get("ContainerArguments") or ["train"]
        container = self.containers.start(
            job.name, job.attempt, host, len(job.hosts), words, told, folder
        )
        container.group = "/aws/sagemaker/TrainingJobs"
        container.stream = f"{job.name}/{job.hosts[host]}-{int(container.began * 1000)}"
        return container

    def fetch(self, channel: dict[str, Any], folder: Path) -> None:
        """File mode: all objects below the prefix are copied."""
        from trainfleet.storage import s3

        address = channel["DataSource"]["S3DataSource"]["S3Uri"]
        for found in s3.list_objects(address):
            path = folder / found.address.removeprefix(address)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(s3.read(found.address) or b"")


def service(account: Account) -> SageMaker:
    """The account's SageMaker; one that can start no containers where a test has made none."""
    if not hasattr(account, "sagemaker"):
        SageMaker(account, None)  # type: ignore[arg-type]
    return account.sagemaker  # type: ignore[attr-defined,no-any-return]


def job_named(account: Account, name: str) -> Job:
    job = service(account).jobs.get(name)
    if job is None:
        raise Refused("ValidationException", "Requested resource not found.")
    return job


@answers("sagemaker", "CreateTrainingJob")
def _create(account: Account, **request: Any) -> dict[str, Any]:
    sagemaker, name = service(account), request["TrainingJobName"]
    arn = f"arn:aws:sagemaker:{account.region}:{account.number}:training-job/{name}"
    if name in sagemaker.jobs:
        raise Refused(
            "ResourceInUse",
            f"Training job names must be unique within an AWS account and region, and a training job with this name already exists ({arn})",
        )
    kind, delta = (
        request["ResourceConfig"]["InstanceType"],
        request["ResourceConfig"]["InstanceCount"],
    )
    limit = f"{kind} for training job usage"
    allowed = account.watched.quotas.get(limit) if hasattr(account, "watched") else None  # type: ignore[attr-defined]
    used = sum(len(one.hosts) for one in sagemaker.jobs.values() if one.status not in FINAL)
    if allowed is not None and used + delta > allowed:
        raise Refused(
            "ResourceLimitExceeded",
            f"The account-level service limit '{limit}' is {allowed:.0f} Instances, with current utilization of {used} Instances and a "
            f"request delta of {delta} Instances. Please use AWS Service Quotas to request an increase for this quota.",
        )
    job = sagemaker.jobs[name] = Job(name, request)
    account.add(
        "training-job", arn, {}, {tag["Key"]: tag["Value"] for tag in request.get("Tags", ())}
    )
    if sagemaker.containers is not None:
        thread = sagemaker.containers.cluster.threads[name] = threading.Thread(
            target=sagemaker.run, args=(job,), daemon=True
        )
        thread.start()
    return {"TrainingJobArn": arn}


@answers("sagemaker", "DescribeTrainingJob")
def _describe(account: Account, TrainingJobName: str) -> dict[str, Any]:
    job = job_named(account, TrainingJobName)
    kept = (
        "ResourceConfig",
        "AlgorithmSpecification",
        "RoleArn",
        "StoppingCondition",
        "Environment",
        "RetryStrategy",
    )
    return {
        "TrainingJobName": job.name, "TrainingJobStatus": job.status, "SecondaryStatus": job.second, "CreationTime": job.created,
        "SecondaryStatusTransitions": list(job.transitions), **({"FailureReason": job.reason} if job.reason else {}),
        **({"TrainingStartTime": job.started} if job.started else {}),
        **{key: job.request[key] for key in kept if key in job.request},
    }  # fmt: skip


@answers("sagemaker", "StopTrainingJob")
def _stop(account: Account, TrainingJobName: str) -> dict[str, Any]:
    job = job_named(account, TrainingJobName)
    if job.status in FINAL:
        raise Refused(
            "ValidationException",
            f"The request was rejected because the training job is in status {job.status}.",
        )
    if not job.asked:
        job.asked, job.status = True, "Stopping"
        job.go("Stopping", "Stopping the training job")
        if service(account).containers is None:  # nobody follows what a test has written down
            account.later(30.0, lambda: service(account).end(job, "Stopped", "Stopped", ""))
    return {}


@answers("sagemaker", "ListTrainingJobs")
def _list(account: Account, NameContains: str = "", **_: Any) -> dict[str, Any]:
    found = sorted(service(account).jobs.values(), key=lambda job: -job.created)
    return {"TrainingJobSummaries": [
        {"TrainingJobName": job.name, "TrainingJobStatus": job.status, "CreationTime": job.created,
         "TrainingJobArn": f"arn:aws:sagemaker:{account.region}:{account.number}:training-job/{job.name}",
         **({"WarmPoolStatus": {"Status": job.warm}} if job.warm else {})}
        for job in found if NameContains in job.name
    ]}  # fmt: skip


@answers("sagemaker", "UpdateTrainingJob")
def _update(
    account: Account, TrainingJobName: str, ResourceConfig: dict[str, int]
) -> dict[str, Any]:
    job = job_named(account, TrainingJobName)
    if job.status not in FINAL or job.warm != "Available":
        raise Refused(
            "ValidationException", "only the warm pool of a job that has ended can be updated"
        )
    if ResourceConfig["KeepAlivePeriodInSeconds"] == 0:
        account.later(20.0, lambda: setattr(job, "warm", "Terminated"))
    return {
        "TrainingJobArn": f"arn:aws:sagemaker:{account.region}:{account.number}:training-job/{TrainingJobName}"
    }


@answers("sagemaker", "DeleteTrainingJob")
def _delete(account: Account, TrainingJobName: str) -> dict[str, Any]:
    job = job_named(account, TrainingJobName)
    if job.status not in FINAL:
        raise Refused(
            "ResourceInUse", f"The training job {TrainingJobName} is in status {job.status}"
        )
    if job.warm == "Available":
        raise Refused("ValidationException", "The training job retains a managed warm pool")
    del service(account).jobs[TrainingJobName]
    account.things.pop(
        f"arn:aws:sagemaker:{account.region}:{account.number}:training-job/{TrainingJobName}", None
    )
    return {}


@answers("sagemaker", "ListTags")
def _tags(account: Account, ResourceArn: str) -> dict[str, Any]:
    thing = account.things.get(ResourceArn)
    return {"Tags": tag_list(thing.tags if thing else {})}
