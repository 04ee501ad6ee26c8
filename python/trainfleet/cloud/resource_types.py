"""The kinds of resources of a fleet: how ours are found by tag, and how one is removed.

The order is the one in which they can be removed. Each is read from the service itself:
the tagging API, which covers all services, still lists deleted resources and does not list roles;
it is used for all other kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.tables import read_table
from ..trust.errors import CloudError
from . import repository
from .api_errors import passing
from .calls import Calls
from .cloudformation import CONFIG, OURS, PROJECT
from .template_inputs import own_tags, slug

Row = Mapping[str, Any]
Things = Iterator[tuple[str, dict[str, str], Row]]  # id, tags, and the service's description
Find = Callable[[Calls, str | None], Things]
Remove = Callable[[Calls, str, Row], object]
# the tag with the versions in a machine image and its snapshots
LOCK = "trainfleet:lock"
GONE = {"deleted", "failed"}  # states of listed resources that no longer exist


@dataclass(frozen=True)
class ResourceKind:
    """A kind of resource: `find` yields ours; `remove` asks AWS to delete one."""

    name: str
    find: Find
    remove: Remove


def tags_of(listed: Any) -> dict[str, str]:
    """Returns tags as a mapping: services write them as an object, or as a list with keys in either
    case.
    """
    if isinstance(listed, Mapping):
        return {str(key): str(value) for key, value in listed.items()}
    return {
        str(tag.get("Key", tag.get("key"))): str(tag.get("Value", tag.get("value", "")))
        for tag in listed or ()
    }


def is_ours(tags: Mapping[str, str], config: str | None) -> bool:
    """Tells whether this program made a resource and, if a config is named, for that config."""
    return tags.get(PROJECT) == OURS and config in (None, tags.get(CONFIG))


def is_gone(error: CloudError) -> bool:
    """Tells whether AWS reports that a resource does not exist, such as one that went after it was
    listed.
    """
    return "NotFound" in error.code or error.code in (
        "NoSuchEntity",
        "NoSuchBucket",
        "InvalidAMIID.Unavailable",
    )


def tags_from(ask: Callable[[], Any]) -> dict[str, str]:
    """Returns a request's tags; empty for a resource that has gone in the meantime."""
    try:
        return tags_of(ask())
    except CloudError as error:
        if is_gone(error):
            return {}
        raise


def _role_tags(calls: Calls, name: str) -> dict[str, str]:
    return tags_from(lambda: list(calls.pages("iam", "ListRoleTags", "Tags", RoleName=name)))


def filters(config: str | None) -> list[dict[str, Any]]:
    """Returns EC2's filters for our resources."""
    own = [{"Name": f"tag:{CONFIG}", "Values": [config]}] if config else []
    return [{"Name": f"tag:{PROJECT}", "Values": [OURS]}, *own]


def _instances(calls: Calls, config: str | None) -> Things:
    for row in instances(calls, config):
        yield row["InstanceId"], tags_of(row.get("Tags")), row


def instances(calls: Calls, config: str | None) -> Iterator[Row]:
    """Lists our instances, except those that are terminated: EC2 remembers them for an hour."""
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


def _remove_gateway(calls: Calls, which: str, row: Row) -> object:
    for attachment in row.get("Attachments", ()):
        calls("ec2", "DetachInternetGateway", InternetGatewayId=which, VpcId=attachment["VpcId"])
    return calls("ec2", "DeleteInternetGateway", InternetGatewayId=which)


def _remove_table(calls: Calls, which: str, row: Row) -> object:
    for one in row.get("Associations", ()):
        if not one.get("Main"):
            calls("ec2", "DisassociateRouteTable", AssociationId=one["RouteTableAssociationId"])
    return calls("ec2", "DeleteRouteTable", RouteTableId=which)


def _roles(calls: Calls, config: str | None) -> Things:
    for row in calls.pages("iam", "ListRoles", "Roles"):
        if not row["RoleName"].startswith(NAMED):
            continue
        tags = _role_tags(calls, row["RoleName"])
        if is_ours(tags, config) and _is_here(calls, tags):
            yield row["RoleName"], tags, row


def _profiles(calls: Calls, config: str | None) -> Things:
    """Yields instance profiles, to which CloudFormation gives no tags: ours by their role, and one
    without a role by its name.
    """
    for row in calls.pages("iam", "ListInstanceProfiles", "InstanceProfiles"):
        if not row["InstanceProfileName"].startswith(NAMED):
            continue
        name, roles = (
            row["InstanceProfileName"],
            [role["RoleName"] for role in row.get("Roles", ())],
        )
        tags = [_role_tags(calls, role) for role in roles]
        if not roles and config and name.startswith(f"{OURS}-{slug(config)}-"):
            yield name, own_tags(config), row
        if tags and is_ours(tags[0], config) and _is_here(calls, tags[0]):
            yield name, tags[0], row


def _is_here(calls: Calls, tags: Mapping[str, str]) -> bool:
    """Tells whether a resource without a region was made for this region, by the stack that made
    it.
    """
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


def _remove_profile(calls: Calls, which: str, row: Row) -> object:
    for role in row.get("Roles", ()):
        calls(
            "iam",
            "RemoveRoleFromInstanceProfile",
            InstanceProfileName=which,
            RoleName=role["RoleName"],
        )
    return calls("iam", "DeleteInstanceProfile", InstanceProfileName=which)


def _buckets(calls: Calls, config: str | None) -> Things:
    for row in calls.pages("s3", "ListBuckets", "Buckets", BucketRegion=calls.region):
        tags: dict[str, str] = {}
        # not ours: ours have tags, which we may read
        with passing("NoSuchTagSet", "NoSuchBucket", "AccessDenied"):
            tags = tags_of(calls("s3", "GetBucketTagging", Bucket=row["Name"])["TagSet"])
        if is_ours(tags, config):
            yield row["Name"], tags, row


def _remove_bucket(calls: Calls, which: str, row: Row) -> object:
    """Deletes every version of every object, every unfinished upload, and then the bucket."""
    for upload in list(calls.pages("s3", "ListMultipartUploads", "Uploads", Bucket=which)):
        calls(
            "s3",
            "AbortMultipartUpload",
            Bucket=which,
            Key=upload["Key"],
            UploadId=upload["UploadId"],
        )
    while objects := _some_versions(calls, which):
        errors = calls(
            "s3", "DeleteObjects", Bucket=which, Delete={"Objects": objects, "Quiet": True}
        ).get("Errors")
        if errors:
            first = {key: str(errors[0].get(key, "")) for key in ("Key", "Message", "Code")}
            where, then = f"s3://{which}/{first['Key']}", "run make clean PURGE=1 again"
            raise CloudError(
                "an object can't be removed",
                where=where,
                why=first["Message"],
                next=then,
                code=first["Code"],
            )
    return calls("s3", "DeleteBucket", Bucket=which)


def _some_versions(calls: Calls, bucket: str) -> list[dict[str, str]]:
    page = calls("s3", "ListObjectVersions", Bucket=bucket, MaxKeys=1000)
    rows = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
    return [{"Key": row["Key"], "VersionId": row["VersionId"]} for row in rows]


def _images(calls: Calls, config: str | None) -> Things:
    """Yields the images that a config holds in the account's repository, or that any config
    does.
    """
    for tag, row in repository.holders(calls):
        owner, dot, _ = tag.partition(".")
        if dot and (config is None or owner == slug(config)):
            yield tag, own_tags(config or owner), row


def _repositories(calls: Calls, config: str | None) -> Things:
    """Yields the account's repository, with its maker's tags, if no config holds an image in it."""
    with passing(repository.GONE):
        rows = calls("ecr", "DescribeRepositories", repositoryNames=[repository.NAME])[
            "repositories"
        ]
        tags = tags_of(
            calls("ecr", "ListTagsForResource", resourceArn=rows[0]["repositoryArn"]).get("tags")
        )
        if is_ours(tags, config) and next(repository.holders(calls), None) is None:
            yield repository.NAME, tags, rows[0]


def _log_groups(calls: Calls, config: str | None) -> Things:
    for row in calls.pages("logs", "DescribeLogGroups", "logGroups", logGroupNamePrefix=LOGS):
        arn = row.get("logGroupArn") or row["arn"].removesuffix(":*")
        tags = tags_from(
            lambda arn=arn: calls("logs", "ListTagsForResource", resourceArn=arn).get("tags")  # type: ignore[misc]
        )
        if is_ours(tags, config):
            yield row["logGroupName"], tags, row


# the beginning of the names of our roles and log groups
NAMED, LOGS = (f"{OURS}-", "/trainfleet")
OWN: dict[
    str, tuple[Find | None, Remove]
] = {  # kinds with their own finder; None: kinds.yaml says how to find them
    "instance": (
        _instances,
        lambda calls, which, row: calls("ec2", "TerminateInstances", InstanceIds=[which]),
    ),
    "AMI": (amis, lambda calls, which, row: calls("ec2", "DeregisterImage", ImageId=which)),
    "internet gateway": (None, _remove_gateway),
    "route table": (None, _remove_table),
    "instance profile": (_profiles, _remove_profile),
    "role": (_roles, _remove_role),
    "log group": (
        _log_groups,
        lambda calls, which, row: calls("logs", "DeleteLogGroup", logGroupName=which),
    ),
    "image": (_images, repository.release_image),
    "repository": (_repositories, repository.remove_repository),
    "bucket": (_buckets, _remove_bucket),
}


def _finder(said: Row) -> Find:
    """Returns the function that finds the resources of a row in kinds.yaml: EC2 filters by tag
    itself, FSx lists everybody's with their tags.
    """
    operation = said["find"]
    key = "Filter" if operation in ("DescribeNatGateways", "DescribeFlowLogs") else "Filters"

    def find(calls: Calls, config: str | None) -> Things:
        asked = {key: filters(config), **said.get("more", {})} if said.get("filters", True) else {}
        for row in calls.pages(said["service"], operation, said["under"], **asked):
            tags = tags_of(row.get("Tags") or row.get("TagSet"))
            if is_ours(tags, config) and str(row.get("State", "")) not in GONE:
                yield row[said["id"]], tags, row

    return find


def _remover(said: Row) -> Remove:
    def remove(calls: Calls, which: str, row: Row) -> object:
        named = {f"{said['id']}s": [which]} if said.get("listed") else {said["id"]: which}
        return calls(said["service"], said["remove"], **named)

    return remove


def _kind(said: Row) -> ResourceKind:
    find, remove = OWN.get(said["kind"]) or (None, _remover(said))
    return ResourceKind(said["kind"], find or _finder(said), remove)


KINDS: tuple[ResourceKind, ...] = tuple(
    _kind(said) for said in read_table(Path(__file__).with_name("kinds.yaml"))
)
