"""Finds a fleet's resources by tag and removes them one by one, for each kind in kinds.yaml and,
for AWS Batch and SageMaker, in scheduler_kinds.yaml.

Each kind is listed by its own service. The tagging API covers all services, but it omits roles and
still lists deleted resources, so inventory.py uses it only for other kinds. Finished Batch jobs are
not included: Batch deletes them after a week, and has no request to do so sooner.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.tables import read_table
from ..trust.errors import CloudError
from . import repository
from .calls import DENIED, Calls, Json, Row, log_streams, passing
from .cloudformation import CONFIG, OURS, PROJECT
from .template_inputs import Tags, own_tags, slug

Things = Iterator[tuple[str, Tags, Row]]  # ID, tags, and the service's entry
Find = Callable[[Calls, str | None], Things]
Remove = Callable[[Calls, str, Row], object]
LOCK = "trainfleet:lock"  # tag with the versions of a machine image and its snapshots
# states of listed resources that no longer exist
GONE = {"deleted", "failed", "DELETING", "DELETED"}
NAMED = f"{OURS}-"  # name prefix of our roles


@dataclass(frozen=True)
class ResourceKind:
    """A kind of resource. `find` yields our resources; `remove` requests the deletion of one."""

    name: str
    find: Find
    remove: Remove


def tags_of(listed: Any) -> Tags:
    """Returns tags as a mapping. Services return an object, or a list whose keys may be
    capitalized.
    """
    if isinstance(listed, Mapping):
        return {str(key): str(value) for key, value in listed.items()}
    return {
        str(tag.get("Key", tag.get("key"))): str(tag.get("Value", tag.get("value", "")))
        for tag in listed or ()
    }


def is_ours(tags: Mapping[str, str], config: str | None) -> bool:
    """Returns whether this program created a resource for `config`, or for any config if that is
    null.
    """
    return tags.get(PROJECT) == OURS and config in (None, tags.get(CONFIG))


def has_our_tags(row: Row, config: str) -> bool:
    """Returns whether an EC2 or FSx entry has this config's tags."""
    return is_ours(tags_of(row.get("Tags")), config)


def is_gone(error: CloudError) -> bool:
    """Returns whether the error means that a resource no longer exists, for example if it was
    deleted after being listed.
    """
    return "NotFound" in error.code or error.code in (
        "NoSuchEntity",
        "NoSuchBucket",
        "InvalidAMIID.Unavailable",
    )


def tags_from(ask: Callable[[], Any]) -> Tags:
    """Returns the tags that `ask` requests, or {} if the resource no longer exists."""
    try:
        return tags_of(ask())
    except CloudError as error:
        if is_gone(error):
            return {}
        raise


def _role_tags(calls: Calls, name: str) -> Tags:
    return tags_from(lambda: list(calls.pages("iam", "ListRoleTags", "Tags", RoleName=name)))


def filters(config: str | None) -> list[Json]:
    """Returns EC2 filters for our tags."""
    own = [{"Name": f"tag:{CONFIG}", "Values": [config]}] if config else []
    return [{"Name": f"tag:{PROJECT}", "Values": [OURS]}, *own]


def _instances(calls: Calls, config: str | None) -> Things:
    for row in instances(calls, config):
        yield row["InstanceId"], tags_of(row.get("Tags")), row


def instances(calls: Calls, config: str | None) -> Iterator[Row]:
    """Yields our instances, except terminated ones, which EC2 keeps listing for an hour."""
    for reservation in calls.pages(
        "ec2", "DescribeInstances", "Reservations", Filters=filters(config)
    ):
        yield from (row for row in reservation["Instances"] if row["State"]["Name"] != "terminated")


def amis(calls: Calls, config: str | None) -> Things:
    """Yields the baked machine images, including failed ones."""
    for row in calls.pages(
        "ec2", "DescribeImages", "Images", Owners=["self"], Filters=filters(config)
    ):
        yield row["ImageId"], tags_of(row.get("Tags")), row


def _roles(calls: Calls, config: str | None) -> Things:
    for row in calls.pages("iam", "ListRoles", "Roles"):
        if not row["RoleName"].startswith(NAMED):
            continue
        tags = _role_tags(calls, row["RoleName"])
        if is_ours(tags, config) and _is_here(calls, tags):
            yield row["RoleName"], tags, row


def _profiles(calls: Calls, config: str | None) -> Things:
    """Yields our instance profiles, which CloudFormation does not tag.

    A profile is ours if its role is, or if it has no role and the name matches.
    """
    for row in calls.pages("iam", "ListInstanceProfiles", "InstanceProfiles"):
        name = row["InstanceProfileName"]
        if not name.startswith(NAMED):
            continue
        tags = [_role_tags(calls, role["RoleName"]) for role in row.get("Roles", ())]
        if not tags and config and name.startswith(f"{NAMED}{slug(config)}-"):
            yield name, own_tags(config), row
        if tags and is_ours(tags[0], config) and _is_here(calls, tags[0]):
            yield name, tags[0], row


def _is_here(calls: Calls, tags: Mapping[str, str]) -> bool:
    """Returns whether a global resource belongs to a stack in this region, according to its tag."""
    parts = tags.get("aws:cloudformation:stack-id", "").split(":")
    return len(parts) < 4 or parts[3] == calls.region


def _remove_role(calls: Calls, which: str, row: Row) -> object:
    for name in list(calls.pages("iam", "ListRolePolicies", "PolicyNames", RoleName=which)):
        calls("iam", "DeleteRolePolicy", RoleName=which, PolicyName=name)
    for policy in list(
        calls.pages("iam", "ListAttachedRolePolicies", "AttachedPolicies", RoleName=which)
    ):
        calls("iam", "DetachRolePolicy", RoleName=which, PolicyArn=policy["PolicyArn"])
    return calls("iam", "DeleteRole", RoleName=which)


def _buckets(calls: Calls, config: str | None) -> Things:
    for row in calls.pages("s3", "ListBuckets", "Buckets", BucketRegion=calls.region):
        tags: Tags = {}
        # A bucket without readable tags is not ours.
        with passing("NoSuchTagSet", "NoSuchBucket", "AccessDenied"):
            tags = tags_of(calls("s3", "GetBucketTagging", Bucket=row["Name"])["TagSet"])
        if is_ours(tags, config):
            yield row["Name"], tags, row


def _remove_bucket(calls: Calls, which: str, row: Row) -> object:
    """Aborts unfinished uploads, deletes all object versions, and then deletes the bucket."""
    for upload in list(calls.pages("s3", "ListMultipartUploads", "Uploads", Bucket=which)):
        calls(
            "s3",
            "AbortMultipartUpload",
            Bucket=which,
            Key=upload["Key"],
            UploadId=upload["UploadId"],
        )
    while objects := _some_versions(calls, which):
        batch = {"Objects": objects, "Quiet": True}
        errors = calls("s3", "DeleteObjects", Bucket=which, Delete=batch).get("Errors")
        if errors:
            key, why, code = (str(errors[0].get(name, "")) for name in ("Key", "Message", "Code"))
            where, then = f"s3://{which}/{key}", "run make clean PURGE=1 again"
            raise CloudError(
                "an object can't be removed", where=where, why=why, next=then, code=code
            )
    return calls("s3", "DeleteBucket", Bucket=which)


def _some_versions(calls: Calls, bucket: str) -> list[dict[str, str]]:
    page = calls("s3", "ListObjectVersions", Bucket=bucket, MaxKeys=1000)
    rows = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
    return [{"Key": row["Key"], "VersionId": row["VersionId"]} for row in rows]


def _images(calls: Calls, config: str | None) -> Things:
    """Yields the images in the account's repository that the config holds, or that any config holds
    if `config` is null.
    """
    for tag, row in repository.holders(calls):
        owner, dot, _ = tag.partition(".")
        if dot and (config is None or owner == slug(config)):
            yield tag, own_tags(config or owner), row


def _repositories(calls: Calls, config: str | None) -> Things:
    """Yields the account's repository if no config holds an image in it."""
    with passing(repository.GONE):
        answer = calls("ecr", "DescribeRepositories", repositoryNames=[repository.NAME])
        rows = answer["repositories"]
        answer = calls("ecr", "ListTagsForResource", resourceArn=rows[0]["repositoryArn"])
        tags = tags_of(answer.get("tags"))
        if is_ours(tags, config) and next(repository.holders(calls), None) is None:
            yield repository.NAME, tags, rows[0]


def _log_groups(calls: Calls, config: str | None) -> Things:
    for row in calls.pages("logs", "DescribeLogGroups", "logGroups", logGroupNamePrefix=f"/{OURS}"):
        arn = row.get("logGroupArn") or row["arn"].removesuffix(":*")
        tags = tags_from(
            lambda arn=arn: calls("logs", "ListTagsForResource", resourceArn=arn).get("tags")  # type: ignore[misc]
        )
        if is_ours(tags, config):
            yield row["logGroupName"], tags, row


def _finder(said: Row) -> Find:
    """Returns a function that finds the resources described by a row of kinds.yaml."""
    operation = said["find"]
    key = "Filter" if operation in ("DescribeNatGateways", "DescribeFlowLogs") else "Filters"

    def find(calls: Calls, config: str | None) -> Things:
        asked = said.get("more", {})
        if said.get("filters", True):
            asked = asked | {key: filters(config)}
        for row in calls.pages(said["service"], operation, said["under"], **asked):
            tags = tags_of(row.get("Tags") or row.get("TagSet") or row.get("tags"))
            if is_ours(tags, config) and not {str(row.get("State")), row.get("status")} & GONE:
                yield row[said["id"]], tags, row

    return find


def _remover(said: Row) -> Remove:
    name, first = said.get("as", said["id"]), said.get("first", {})

    def remove(calls: Calls, which: str, row: Row) -> object:
        for one in row.get(first.get("each"), ()):
            if not one.get(first.get("unless")):
                values = {**row, **one}
                named = {parameter: values[key] for parameter, key in first["with"].items()}
                calls(said["service"], first["call"], **named)
        named = {f"{name}s": [which]} if said.get("listed") else {name: which}
        return calls(said["service"], said["remove"], **named)

    return remove


PARAMETERS = "/trainfleet/"
LOGS = "/aws/sagemaker/TrainingJobs"  # SageMaker's log group for all training jobs of an account
JOB = r"[a-z0-9-]+-[0-9a-f]{16}"  # name pattern of our training jobs
ENDED = ("Completed", "Failed", "Stopped")
BUSY = re.compile(
    r"being modified|in use|[Cc]annot delete|still|relationship|DISABLED", re.IGNORECASE
)


def _remove_queue(calls: Calls, which: str, row: Row) -> object:
    """Terminates a queue's jobs, disables the queue and deletes it.

    Each step fails until the previous one has finished, so the sweep repeats this function.
    """
    for status in ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING"):
        named = {"jobQueue": which, "jobStatus": status}
        for job in calls.pages("batch", "ListJobs", "jobSummaryList", **named):
            calls("batch", "TerminateJob", jobId=job["jobId"], reason="make clean")
    return _take_away("JobQueue", calls, which, row)


def _take_away(kind: str, calls: Calls, which: str, row: Row) -> object:
    """Disables and deletes a job queue or compute environment.

    Batch refuses while a change is in progress, so the sweep repeats this function.
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
    """Returns whether a training job's machines are running, or are kept in its warm pool."""
    return row["TrainingJobStatus"] not in ENDED or _is_warm(row)


def _is_warm(row: Row) -> bool:
    return bool(row.get("WarmPoolStatus", {}).get("Status") == "Available")


def _machines(calls: Calls, row: Row) -> Json:
    record = calls("sagemaker", "DescribeTrainingJob", TrainingJobName=row["TrainingJobName"])
    return {"ResourceConfig": record.get("ResourceConfig", {})}


def _remove_job(calls: Calls, which: str, row: Row) -> object:
    """Stops a training job, ends its warm pool, and deletes its logs and the job.

    Each step fails until the previous one has finished, so the sweep repeats this function.
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
    """Deletes a job's streams in SageMaker's log group, if the caller has permission."""
    with passing(*DENIED):
        for stream in log_streams(calls, LOGS, f"{job}/"):
            calls("logs", "DeleteLogStream", logGroupName=LOGS, logStreamName=stream)


def _parameters(calls: Calls, config: str | None) -> Things:
    path = f"{PARAMETERS}{config}" if config else PARAMETERS.rstrip("/")
    names = {"Path": path, "Recursive": True, "WithDecryption": False}
    for row in calls.pages("ssm", "GetParametersByPath", "Parameters", **names):
        yield row["Name"], own_tags(row["Name"].split("/")[2]), {"Name": row["Name"]}


FINDERS: dict[str, Find] = {
    "instance": _instances,
    "AMI": amis,
    "instance profile": _profiles,
    "role": _roles,
    "log group": _log_groups,
    "image": _images,
    "repository": _repositories,
    "bucket": _buckets,
    "training job": _jobs,
    "parameter": _parameters,
}
REMOVERS: dict[str, Remove] = {
    "role": _remove_role,
    "image": repository.release_image,
    "repository": repository.remove_repository,
    "bucket": _remove_bucket,
    "training job": _remove_job,
    "job queue": _remove_queue,
    "environment": functools.partial(_take_away, "ComputeEnvironment"),
}


def _kinds(table: str) -> tuple[ResourceKind, ...]:
    """Returns the kinds in a table, with their functions from FINDERS and REMOVERS, if any."""
    return tuple(
        ResourceKind(
            name := said["kind"],
            FINDERS.get(name) or _finder(said),
            REMOVERS.get(name) or _remover(said),
        )
        for said in read_table(Path(__file__).with_name(table))
    )


KINDS, SCHEDULER_KINDS = _kinds("kinds.yaml"), _kinds("scheduler_kinds.yaml")
