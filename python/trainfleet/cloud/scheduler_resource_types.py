"""The resources of AWS Batch and SageMaker, found by tag and removed, as resource_types.py does for
a fleet.

Ended jobs of Batch are not among them: Batch forgets them after a week, and takes no request
to do so sooner.
"""

from __future__ import annotations

import re
from typing import Any

from ..trust.errors import CloudError
from .api_errors import DENIED, passing
from .calls import Calls
from .log_streams import streams
from .resource_types import Find, ResourceKind, Row, Things, is_ours, tags_of
from .template_inputs import own_tags, slug

PARAMETERS = "/trainfleet/"
LOGS = "/aws/sagemaker/TrainingJobs"  # SageMaker's log group for all training jobs of an account
JOB = r"[a-z0-9-]+-[0-9a-f]{16}"  # the name of our training jobs
ENDED = ("Completed", "Failed", "Stopped")
BUSY = re.compile(
    r"being modified|in use|[Cc]annot delete|still|relationship|DISABLED", re.IGNORECASE
)


def _of_batch(operation: str, under: str, id_: str, **more: str) -> Find:
    def find(calls: Calls, config: str | None) -> Things:
        for row in calls.pages("batch", operation, under, **more):
            if is_ours(tags := tags_of(row.get("tags")), config) and row.get("status") not in (
                "DELETING",
                "DELETED",
            ):
                yield row[id_], tags, row

    return find


def _remove_queue(calls: Calls, which: str, row: Row) -> object:
    """Ends a queue's jobs, disables it and deletes it. Each step needs the one before, so the sweep
    repeats this.
    """
    for status in ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING"):
        for job in calls.pages(
            "batch", "ListJobs", "jobSummaryList", jobQueue=which, jobStatus=status
        ):
            calls("batch", "TerminateJob", jobId=job["jobId"], reason="make clean")
    return _take_away(calls, "JobQueue", which, row)


def _take_away(calls: Calls, kind: str, which: str, row: Row) -> object:
    """Disables and deletes. While Batch refuses because it is changing something, the sweep asks
    again.
    """
    named = {kind[0].lower() + kind[1:]: which}
    try:
        if row.get("state") == "ENABLED":
            calls("batch", f"Update{kind}", **named, state="DISABLED")
        return calls("batch", f"Delete{kind}", **named)
    except CloudError as error:
        if error.code == "ClientException" and BUSY.search(error.why):
            raise CloudError(
                error.what,
                where=error.where,
                why=error.why,
                next=error.next,
                code="DependencyViolation",
            ) from error
        raise


def _jobs(calls: Calls, config: str | None) -> Things:
    named = {"NameContains": slug(config, 46)} if config else {}
    for row in calls.pages("sagemaker", "ListTrainingJobs", "TrainingJobSummaries", **named):
        if re.fullmatch(JOB, row["TrainingJobName"]):
            tags = tags_of(
                calls("sagemaker", "ListTags", ResourceArn=row["TrainingJobArn"]).get("Tags")
            )
            if is_ours(tags, config):
                yield (
                    row["TrainingJobName"],
                    tags,
                    row | (_machines(calls, row) if costs(row) else {}),
                )


def costs(row: Row) -> bool:
    """Tells whether a training job has machines, or keeps those of its warm pool."""
    return row["TrainingJobStatus"] not in ENDED or _is_warm(row)


def _is_warm(row: Row) -> bool:
    return bool(row.get("WarmPoolStatus", {}).get("Status") == "Available")


def _machines(calls: Calls, row: Row) -> dict[str, Any]:
    record = calls("sagemaker", "DescribeTrainingJob", TrainingJobName=row["TrainingJobName"])
    return {"ResourceConfig": record.get("ResourceConfig", {})}


def _remove_job(calls: Calls, which: str, row: Row) -> object:
    """Stops a training job, ends its warm pool, and deletes its log and the job. Each step needs
    the one before, so the sweep repeats this.
    """
    if not costs(row):
        _remove_log(calls, which)
        return calls("sagemaker", "DeleteTrainingJob", TrainingJobName=which)
    with passing("ValidationException"):  # it has ended since it was listed
        if row["TrainingJobStatus"] == "InProgress":
            calls("sagemaker", "StopTrainingJob", TrainingJobName=which)
        elif _is_warm(row):
            calls(
                "sagemaker",
                "UpdateTrainingJob",
                TrainingJobName=which,
                ResourceConfig={"KeepAlivePeriodInSeconds": 0},
            )
    raise CloudError(
        "the job is ending",
        where=which,
        why="it is removed once it has ended",
        code="DependencyViolation",
    )


def _remove_log(calls: Calls, job: str) -> None:
    """Deletes a job's streams in SageMaker's log group. If the caller may not, they stay and the
    job is deleted.
    """
    with passing(*DENIED):
        for stream in streams(calls, LOGS, f"{job}/"):
            calls("logs", "DeleteLogStream", logGroupName=LOGS, logStreamName=stream)


def _parameters(calls: Calls, config: str | None) -> Things:
    path = f"{PARAMETERS}{config}" if config else PARAMETERS.rstrip("/")
    for row in calls.pages(
        "ssm", "GetParametersByPath", "Parameters", Path=path, Recursive=True, WithDecryption=False
    ):
        yield row["Name"], own_tags(row["Name"].split("/")[2]), {"Name": row["Name"]}


SCHEDULER_KINDS: tuple[ResourceKind, ...] = (
    ResourceKind("training job", _jobs, _remove_job),
    ResourceKind(
        "job queue", _of_batch("DescribeJobQueues", "jobQueues", "jobQueueName"), _remove_queue
    ),
    ResourceKind(
        "environment",
        _of_batch("DescribeComputeEnvironments", "computeEnvironments", "computeEnvironmentName"),
        lambda calls, which, row: _take_away(calls, "ComputeEnvironment", which, row),
    ),
    ResourceKind(
        "job definition",
        _of_batch("DescribeJobDefinitions", "jobDefinitions", "jobDefinitionArn", status="ACTIVE"),
        lambda calls, which, row: calls("batch", "DeregisterJobDefinition", jobDefinition=which),
    ),
    ResourceKind(
        "parameter",
        _parameters,
        lambda calls, which, row: calls("ssm", "DeleteParameter", Name=which),
    ),
)
