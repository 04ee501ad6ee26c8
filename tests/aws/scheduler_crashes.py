"""An account in which AWS Batch or SageMaker is at work for the config `cloudy`, and for others who must not notice its end."""

from __future__ import annotations

from typing import Any

from trainfleet.cloud.resource_types import ENDED, LOGS
from trainfleet.storage.s3_sync_agent import BUCKET

from . import logs  # noqa: F401  what CloudWatch Logs answers
from .account import Account
from .batch import Batch, Job, Node
from .sagemaker import Job as Training
from .sagemaker import SageMaker

OURS = {"trainfleet:project": "trainfleet", "trainfleet:config": "cloudy"}
THEIRS = {"team": "theirs"}
NODES = {
    "mainNode": 0,
    "numNodes": 2,
    "nodeRangeProperties": [{"container": {"image": "x/y:z"}, "targetNodes": "0:"}],
}
DEFINITION = {"jobDefinitionName": "cloudy-train-0", "type": "multinode", "nodeProperties": NODES}
MACHINES = {"InstanceType": "ml.c7i.8xlarge", "InstanceCount": 2}


def said(scheduler: str) -> dict[str, Any]:
    """The config, which leaves queue and roles to the stack."""
    fleet = {"backend": scheduler, "nodes": 2, "instance_type": "c7i.8xlarge", "shared_folder": "s3://theirs/some",
             "container": "x/y:z", "aws": {"region": "us-east-1"}}  # fmt: skip
    return {"name": "cloudy", "fleet": fleet, "train": {"global_batch_size": 12},
            "data": {"name": "text", "sources": ["s3://theirs/text"], "tokenized_path": "s3://theirs/sets", "vocab_size": 340},
            "checkpoint": {"path": "s3://theirs/checkpoints"}}  # fmt: skip


def others(account: Account) -> None:
    """Somebody else's queue with a job that runs, and a training job that is called as one of ours would be."""
    batch, sagemaker = Batch(account, None), SageMaker(account, None)  # type: ignore[arg-type]
    batch.queue_of_mine("their-queue", "c7i.8xlarge", 64)
    batch.jobs["theirs"] = Job(
        "theirs",
        "theirs-train-0123456789abcdef",
        "their-queue",
        DEFINITION,
        {},
        [Node()],
        "RUNNING",
    )
    _training(account, sagemaker, "cloudy-00112233445566aa", THEIRS)


def at_work(account: Account) -> None:
    """What a user of ours has done since setup: jobs that wait and run, one whose machines are kept warm, definitions, a secret."""
    batch, sagemaker = account.batch, account.sagemaker  # type: ignore[attr-defined]
    queues = [
        thing.id
        for thing in account.of("job-queue")
        if thing.tags.get("trainfleet:config") == "cloudy"
    ]
    for number, status in enumerate(("RUNNABLE", "RUNNING", "SUCCEEDED") if queues else ()):
        batch.jobs[f"{number}"] = Job(
            f"{number}",
            f"cloudy-train-{number:016x}",
            queues[0],
            DEFINITION,
            {},
            [Node(), Node()],
            status,
        )
    for name in ("cloudy-train-1", "cloudy-tokenize-1") if queues else ():
        account.respond(
            account.region,
            "batch",
            "RegisterJobDefinition",
            DEFINITION | {"jobDefinitionName": name, "tags": OURS},
        )
    for number, status in enumerate(("InProgress", "Completed", "Completed")):
        job = _training(account, sagemaker, f"cloudy-{number:016x}", OURS, status)
    job.warm = "Available"
    account.add(
        "parameter", "/trainfleet/cloudy/THE_KEY", {"Value": "x", "Type": "SecureString"}, OURS
    )


def _training(
    account: Account,
    service: SageMaker,
    name: str,
    tags: dict[str, str],
    status: str = "InProgress",
) -> Training:
    request = {
        "ResourceConfig": MACHINES,
        "Environment": {BUCKET: "s3://theirs/some"} if tags is OURS else {},
    }
    job = service.jobs[name] = Training(
        name, request, status, "Training" if status not in ENDED else status
    )
    account.add(
        "training-job",
        f"arn:aws:sagemaker:{account.region}:{account.number}:training-job/{name}",
        {},
        tags,
    )
    account.add("log-stream", f"{name}/algo-1-1700000000", {"group": LOGS}, tags)
    return job


def undisturbed(account: Account) -> bool:
    """Whether others' jobs go on."""
    batch, sagemaker = account.batch, account.sagemaker  # type: ignore[attr-defined]
    return bool(
        batch.jobs["theirs"].status == "RUNNING"
        and sagemaker.jobs["cloudy-00112233445566aa"].status == "InProgress"
    )
