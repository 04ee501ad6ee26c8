"""Finds the resources of AWS Batch and SageMaker by tag and removes them, as resource_types.py does
for a fleet.

Ended jobs of Batch are not included: Batch deletes them after a week, and has no request to do so
sooner.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from ..trust.errors import CloudError
from .api_errors import DENIED, passing
from .calls import Calls
from .log_streams import streams
from .resource_types import Find, Remove, Row, Things, is_ours, kinds, tags_of
from .template_inputs import own_tags, slug

PARAMETERS = "/trainfleet/"
LOGS = "/aws/sagemaker/TrainingJobs"  # SageMaker's log group for all training jobs of an account
JOB = r"[a-z0-9-]+-[0-9a-f]{16}"  # the name of our training jobs
ENDED = ("Completed", "Failed", "Stopped")
BUSY = re.compile(
    r"being modified|in use|[Cc]annot delete|still|relationship|DISABLED", re.IGNORECASE
)


def _remove_queue(calls: Calls, which: str, row: Row) -> object:
    """Terminates a queue's jobs, disables the queue and deletes it.

    Each step fails until the one before has ended, so the sweep repeats this function.
    """
    for status in ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING"):
        named = {"jobQueue": which, "jobStatus": status}
        for job in calls.pages("batch", "ListJobs", "jobSummaryList", **named):
            calls("batch", "TerminateJob", jobId=job["jobId"], reason="make clean")
    return _take_away("JobQueue", calls, which, row)


def _take_away(kind: str, calls: Calls, which: str, row: Row) -> object:
    """Disables and deletes a queue or an environment.

    While Batch refuses because of a change in progress, the sweep repeats this function.
    """
    named = {kind[0].lower() + kind[1:]: which}
    try:
        if row.get("state") == "ENABLED":
            calls("batch", f"Update{kind}", **named, state="DISABLED")
        return calls("batch", f"Delete{kind}", **named)
    except CloudError as error:
        if error.code == "ClientException" and BUSY.search(error.why):
            error.code = "DependencyViolation"
        raise


def _jobs(calls: Calls, config: str | None) -> Things:
    named = {"NameContains": slug(config, 46)} if config else {}
    for row in calls.pages("sagemaker", "ListTrainingJobs", "TrainingJobSummaries", **named):
        name = row["TrainingJobName"]
        if not re.fullmatch(JOB, name):
            continue
        answer = calls("sagemaker", "ListTags", ResourceArn=row["TrainingJobArn"])
        if is_ours(tags := tags_of(answer.get("Tags")), config):
            yield name, tags, row | (_machines(calls, row) if costs(row) else {})


def costs(row: Row) -> bool:
    """Returns whether a training job runs machines or keeps them in its warm pool."""
    return row["TrainingJobStatus"] not in ENDED or _is_warm(row)


def _is_warm(row: Row) -> bool:
    return bool(row.get("WarmPoolStatus", {}).get("Status") == "Available")


def _machines(calls: Calls, row: Row) -> dict[str, Any]:
    record = calls("sagemaker", "DescribeTrainingJob", TrainingJobName=row["TrainingJobName"])
    return {"ResourceConfig": record.get("ResourceConfig", {})}


def _remove_job(calls: Calls, which: str, row: Row) -> object:
    """Stops a training job, ends its warm pool, and deletes its log and the job.

    Each step fails until the one before has ended, so the sweep repeats this function.
    """
    if not costs(row):
        _remove_log(calls, which)
        return calls("sagemaker", "DeleteTrainingJob", TrainingJobName=which)
    with passing("ValidationException"):  # the job has ended since it was listed
        if row["TrainingJobStatus"] == "InProgress":
            calls("sagemaker", "StopTrainingJob", TrainingJobName=which)
        elif _is_warm(row):
            ends = {"KeepAlivePeriodInSeconds": 0}
            calls("sagemaker", "UpdateTrainingJob", TrainingJobName=which, ResourceConfig=ends)
    why = "it is removed once it has ended"
    raise CloudError("the job is ending", where=which, why=why, code="DependencyViolation")


def _remove_log(calls: Calls, job: str) -> None:
    """Deletes a job's streams in SageMaker's log group, unless the caller's permissions lack it."""
    with passing(*DENIED):
        for stream in streams(calls, LOGS, f"{job}/"):
            calls("logs", "DeleteLogStream", logGroupName=LOGS, logStreamName=stream)


def _parameters(calls: Calls, config: str | None) -> Things:
    path = f"{PARAMETERS}{config}" if config else PARAMETERS.rstrip("/")
    names = {"Path": path, "Recursive": True, "WithDecryption": False}
    for row in calls.pages("ssm", "GetParametersByPath", "Parameters", **names):
        yield row["Name"], own_tags(row["Name"].split("/")[2]), {"Name": row["Name"]}


FINDERS: dict[str, Find] = {"training job": _jobs, "parameter": _parameters}
REMOVERS: dict[str, Remove] = {
    "training job": _remove_job,
    "job queue": _remove_queue,
    "environment": functools.partial(_take_away, "ComputeEnvironment"),
}
SCHEDULER_KINDS = kinds("scheduler_kinds.yaml", FINDERS, REMOVERS)
