"""The pretended account's file systems, buckets, images, logs and roles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .account import Account, Refused, Thing, answers, moment_of, tag_list
from .amis import AMIS

FORMATTED, DELETED = 420.0, 240.0  # seconds until a file system can be used, and until it is gone
CARDS_GO = (
    60.0  # seconds after that until its interfaces are gone, which its security group waits for
)


# FSx


def make_file_system(
    account: Account, properties: Mapping[str, Any], tags: Mapping[str, str], made_by: str = ""
) -> Thing:
    id = account.new_id("fs-")
    thing = account.add(
        "file-system", id, dict(properties), tags, made_by, mount=id[-8:], written=0.0
    )
    thing.state = "CREATING"
    subnet = account.things.get(str(next(iter(properties.get("SubnetIds", ())), "")))
    account.add("network-interface", account.new_id("eni-"), {
        "SubnetId": getattr(subnet, "id", None), "Groups": properties.get("SecurityGroupIds", []), "Attachment": {"InstanceOwnerId": "amazon-fsx"},
        "VpcId": subnet.properties.get("VpcId") if subnet else None, "Description": f"Created for FSx file system {id}"}, {}, id, RequesterManaged=True)  # fmt: skip
    account.later(FORMATTED, lambda: _formatted(thing))
    return thing


def _formatted(thing: Thing) -> None:
    if thing.state == "CREATING":
        thing.state = "AVAILABLE"


def delete_file_system(account: Account, id: str) -> None:
    thing = account.get("file-system", id, "FileSystemNotFound")
    if thing.state == "DELETING":
        return
    thing.state = "DELETING"

    def gone() -> None:
        account.things.pop(id, None)
        account.later(CARDS_GO, cards_gone)

    def cards_gone() -> None:
        for card in [card for card in account.things.values() if card.made_by == id]:
            account.things.pop(card.id)

    account.later(DELETED, gone)


@answers("fsx", "DescribeFileSystems")
def describe_file_systems(
    account: Account, FileSystemIds: Iterable[str] = (), **_: Any
) -> dict[str, Any]:
    wanted = list(FileSystemIds)
    rows = [
        _file_system(account, thing)
        for thing in account.of("file-system")
        if not wanted or thing.id in wanted
    ]
    if len(rows) < len(wanted):
        raise Refused("FileSystemNotFound", f"File system '{wanted[0]}' does not exist.")
    return {"FileSystems": rows}


def _file_system(account: Account, thing: Thing) -> dict[str, Any]:
    lustre = {key: value for key, value in thing.properties.get("LustreConfiguration", {}).items()
              if key in ("DeploymentType", "PerUnitStorageThroughput")}  # fmt: skip
    return {
        "FileSystemId": thing.id, "FileSystemType": "LUSTRE", "Lifecycle": thing.state, "CreationTime": moment_of(thing.since),
        "StorageCapacity": thing.properties.get("StorageCapacity", 1200), "StorageType": "SSD", "Tags": tag_list(thing.tags),
        "DNSName": f"{thing.id}.fsx.{account.region}.amazonaws.com", "LustreConfiguration": {"MountName": thing.more["mount"], **lustre},
        "NetworkInterfaceIds": [card.id for card in account.things.values() if card.made_by == thing.id], "VpcId": thing.more.get("vpc", "vpc-0"),
        "ResourceARN": f"arn:aws:fsx:{account.region}:{account.number}:file-system/{thing.id}",
    }  # fmt: skip


@answers("fsx", "DeleteFileSystem")
def delete_file_system_asked(account: Account, FileSystemId: str, **_: Any) -> dict[str, Any]:
    delete_file_system(account, FileSystemId)
    return {"FileSystemId": FileSystemId, "Lifecycle": "DELETING"}


@answers("fsx", "DescribeDataRepositoryAssociations")
def describe_associations(account: Account, **_: Any) -> dict[str, Any]:
    rows = [{"AssociationId": thing.id, "Lifecycle": thing.state, "FileSystemId": thing.properties.get("FileSystemId", "fs-0"), "FileSystemPath": thing.properties.get("FileSystemPath", "/"),
             "Tags": tag_list(thing.tags)} for thing in account.of("data-repository-association")]  # fmt: skip
    return {"Associations": rows}


@answers("fsx", "DeleteDataRepositoryAssociation")
def delete_association(account: Account, AssociationId: str, **_: Any) -> dict[str, Any]:
    account.get("data-repository-association", AssociationId, "DataRepositoryAssociationNotFound")
    del account.things[AssociationId]
    return {"AssociationId": AssociationId, "Lifecycle": "DELETING"}


@answers("fsx", "DescribeBackups")
def describe_backups(account: Account, **_: Any) -> dict[str, Any]:
    return {"Backups": [{"BackupId": thing.id, "Lifecycle": "AVAILABLE", "Type": "USER_INITIATED", "CreationTime": moment_of(thing.since),
                         "FileSystem": {"FileSystemId": thing.properties.get("FileSystemId", ""), "StorageCapacity": 1200},
                         "Tags": tag_list(thing.tags)} for thing in account.of("backup")]}  # fmt: skip


@answers("fsx", "DeleteBackup")
def delete_backup(account: Account, BackupId: str, **_: Any) -> dict[str, Any]:
    account.get("backup", BackupId, "BackupNotFound")
    del account.things[BackupId]
    return {"BackupId": BackupId, "Lifecycle": "DELETED"}


@answers("cloudwatch", "GetMetricStatistics")
def metric(
    account: Account, Namespace: str, MetricName: str, Dimensions: list[dict[str, str]], **_: Any
) -> dict[str, Any]:
    thing = account.things.get(Dimensions[0]["Value"])
    if Namespace == "AWS/S3" and thing and "size" in thing.more:
        return {
            "Label": MetricName,
            "Datapoints": [
                {
                    "Timestamp": moment_of(account.now),
                    "Average": thing.more["size"],
                    "Unit": "Bytes",
                }
            ],
        }
    if (
        thing is None
        or Namespace != "AWS/FSx"
        or MetricName != "DataWriteBytes"
        or thing.state != "AVAILABLE"
    ):
        return {"Label": MetricName, "Datapoints": []}
    return {
        "Label": MetricName,
        "Datapoints": [
            {"Timestamp": moment_of(account.now), "Sum": thing.more["written"], "Unit": "Bytes"}
        ],
    }


# S3


@answers("s3", "ListBuckets")
def list_buckets(account: Account, **_: Any) -> dict[str, Any]:
    return {"Buckets": [{"Name": thing.id, "CreationDate": moment_of(thing.since), "BucketRegion": account.region}
                        for thing in account.of("bucket")]}  # fmt: skip


def bucket(account: Account, name: str) -> Thing:
    return account.get("bucket", name, "NoSuchBucket")


@answers("s3", "GetBucketTagging")
def bucket_tags(account: Account, Bucket: str) -> dict[str, Any]:
    if not (tags := bucket(account, Bucket).tags):
        raise Refused("NoSuchTagSet", "The TagSet does not exist")
    return {"TagSet": tag_list(tags)}


@answers("s3", "ListObjectsV2")
def list_objects(account: Account, Bucket: str, MaxKeys: int = 1000, **_: Any) -> dict[str, Any]:
    objects = bucket(account, Bucket).more.get("objects", {})
    rows = [{"Key": key, "Size": size} for key, size in sorted(objects.items())][:MaxKeys]
    return (
        {"Contents": rows, "KeyCount": len(rows), "IsTruncated": len(objects) > len(rows)}
        if rows
        else {"KeyCount": 0, "IsTruncated": False}
    )


@answers("s3", "ListObjectVersions")
def list_versions(account: Account, Bucket: str, **_: Any) -> dict[str, Any]:
    objects = bucket(account, Bucket).more.get("objects", {})
    return {
        "Versions": [
            {"Key": key, "VersionId": "null", "Size": size}
            for key, size in sorted(objects.items())[:1000]
        ]
    }


@answers("s3", "ListMultipartUploads")
def list_uploads(account: Account, Bucket: str, **_: Any) -> dict[str, Any]:
    return {
        "Uploads": [
            {"Key": key, "UploadId": id}
            for key, id in bucket(account, Bucket).more.get("uploads", {}).items()
        ]
    }


@answers("s3", "AbortMultipartUpload")
def abort_upload(account: Account, Bucket: str, Key: str, UploadId: str) -> dict[str, Any]:
    bucket(account, Bucket).more.get("uploads", {}).pop(Key, None)
    return {}


@answers("s3", "DeleteObjects")
def delete_objects(
    account: Account, Bucket: str, Delete: dict[str, Any], **_: Any
) -> dict[str, Any]:
    for row in Delete["Objects"]:
        bucket(account, Bucket).more.get("objects", {}).pop(row["Key"], None)
    return {}


@answers("s3", "DeleteBucket")
def delete_bucket(account: Account, Bucket: str) -> dict[str, Any]:
    if bucket(account, Bucket).more.get("objects") or bucket(account, Bucket).more.get("uploads"):
        raise Refused("BucketNotEmpty", "The bucket you tried to delete is not empty")
    del account.things[Bucket]
    return {}


# ECR, logs


@answers("ecr", "CreateRepository")
def create_repository(
    account: Account, repositoryName: str, tags: Iterable[Mapping[str, str]] = (), **more: Any
) -> dict[str, Any]:
    if repositoryName in account.things:
        raise Refused(
            "RepositoryAlreadyExistsException",
            f"The repository with name '{repositoryName}' already exists",
        )
    account.add(
        "repository", repositoryName, more, {tag["Key"]: tag["Value"] for tag in tags}, images={}
    )
    return {}


@answers("ecr", "PutLifecyclePolicy")
def put_lifecycle_policy(account: Account, repositoryName: str, **_: Any) -> dict[str, Any]:
    _repository(account, repositoryName)
    return {}


@answers("ecr", "DescribeRepositories")
def describe_repositories(
    account: Account, repositoryNames: Iterable[str] = (), **_: Any
) -> dict[str, Any]:
    wanted = list(repositoryNames)
    rows = [thing for thing in account.of("repository") if not wanted or thing.id in wanted]
    if len(rows) < len(wanted):
        raise Refused(
            "RepositoryNotFoundException", f"The repository with name '{wanted[0]}' does not exist"
        )
    return {"repositories": [{"repositoryName": thing.id, "repositoryArn": arn_of(account, thing), "createdAt": moment_of(thing.since),
                              "imageTagMutability": thing.properties.get("imageTagMutability", "MUTABLE")} for thing in rows]}  # fmt: skip


def _repository(account: Account, name: str) -> Thing:
    """Its images are in more["images"]: digest → tags."""
    return account.get("repository", name, "RepositoryNotFoundException")


@answers("ecr", "ListTagsForResource")
def repository_tags(account: Account, resourceArn: str) -> dict[str, Any]:
    return {"tags": tag_list(_repository(account, resourceArn.partition(":repository/")[2]).tags)}


def _images(account: Account, name: str, status: str) -> list[tuple[str, set[str]]]:
    images = _repository(account, name).more.get("images", {})
    return [
        (digest, tags)
        for digest, tags in images.items()
        if status == "ANY" or bool(tags) == (status == "TAGGED")
    ]


@answers("ecr", "ListImages")
def list_images(
    account: Account, repositoryName: str, filter: Mapping[str, str], **_: Any
) -> dict[str, Any]:
    found = _images(account, repositoryName, filter["tagStatus"])
    return {
        "imageIds": [
            {"imageDigest": digest} | ({"imageTag": tag} if tag else {})
            for digest, tags in found
            for tag in tags or [""]
        ]
    }


@answers("ecr", "DescribeImages")
def describe_images(
    account: Account, repositoryName: str, filter: Mapping[str, str], **_: Any
) -> dict[str, Any]:
    found = _images(account, repositoryName, filter["tagStatus"])
    return {
        "imageDetails": [
            {"imageDigest": digest, "imageTags": sorted(tags), "imageSizeInBytes": 2**30}
            for digest, tags in found
        ]
    }


@answers("ecr", "BatchDeleteImage")
def delete_images(
    account: Account, repositoryName: str, imageIds: Iterable[Mapping[str, str]], **_: Any
) -> dict[str, Any]:
    """A tag goes, and an image with its last tag; by its digest an image goes with all of them."""
    images = _repository(account, repositoryName).more.get("images", {})
    for one in imageIds:
        for digest, tags in list(images.items()):
            if one.get("imageTag") in tags:
                tags.discard(one["imageTag"])
            elif one.get("imageDigest") != digest or "imageTag" in one:
                continue
            if "imageTag" not in one or not tags:
                del images[digest]
    return {"imageIds": list(imageIds), "failures": []}


@answers("ecr", "DeleteRepository")
def delete_repository(
    account: Account, repositoryName: str, force: bool = False, **_: Any
) -> dict[str, Any]:
    if _repository(account, repositoryName).more.get("images") and not force:
        raise Refused(
            "RepositoryNotEmptyException",
            "The repository cannot be deleted because it still contains images",
        )
    del account.things[repositoryName]
    return {}


@answers("logs", "DescribeLogGroups")
def describe_log_groups(account: Account, logGroupNamePrefix: str = "", **_: Any) -> dict[str, Any]:
    rows = [thing for thing in account.of("log-group") if thing.id.startswith(logGroupNamePrefix)]
    return {"logGroups": [{"logGroupName": thing.id, "creationTime": int(thing.since * 1000), "storedBytes": thing.more.get("bytes", 0),
                           "arn": arn_of(account, thing) + ":*", "logGroupArn": arn_of(account, thing)} for thing in rows]}  # fmt: skip


@answers("logs", "ListTagsForResource")
def log_group_tags(account: Account, resourceArn: str) -> dict[str, Any]:
    name = resourceArn.partition(":log-group:")[2].removesuffix(":*")
    return {"tags": account.get("log-group", name, "ResourceNotFoundException").tags}


@answers("logs", "DeleteLogGroup")
def delete_log_group(account: Account, logGroupName: str) -> dict[str, Any]:
    account.get("log-group", logGroupName, "ResourceNotFoundException")
    del account.things[logGroupName]
    return {}


# IAM


@answers("iam", "ListRoles")
def list_roles(account: Account, PathPrefix: str = "/", **_: Any) -> dict[str, Any]:
    return {
        "Roles": [
            _role(account, thing)
            for thing in account.of("role")
            if thing.properties.get("Path", "/").startswith(PathPrefix)
        ]
    }


def _role(account: Account, thing: Thing) -> dict[str, Any]:
    return {"RoleName": thing.id, "Path": thing.properties.get("Path", "/"), "RoleId": thing.more.get("role_id", "AROA0123456789ABCDEF"), "Arn": arn_of(account, thing),
            "CreateDate": moment_of(thing.since),
            "AssumeRolePolicyDocument": thing.properties.get("AssumeRolePolicyDocument", {})}  # fmt: skip


@answers("iam", "ListRoleTags")
def role_tags(account: Account, RoleName: str, **_: Any) -> dict[str, Any]:
    return {"Tags": tag_list(account.get("role", RoleName, "NoSuchEntity").tags)}


@answers("iam", "GetRole")
def get_role(account: Account, RoleName: str) -> dict[str, Any]:
    return {"Role": _role(account, account.get("role", RoleName, "NoSuchEntity"))}


@answers("iam", "ListRolePolicies")
def role_policies(account: Account, RoleName: str, **_: Any) -> dict[str, Any]:
    return {
        "PolicyNames": [
            row["PolicyName"]
            for row in account.get("role", RoleName, "NoSuchEntity").properties.get("Policies", [])
        ]
    }


@answers("iam", "ListAttachedRolePolicies")
def attached_policies(account: Account, RoleName: str, **_: Any) -> dict[str, Any]:
    arns = account.get("role", RoleName, "NoSuchEntity").properties.get("ManagedPolicyArns", [])
    return {
        "AttachedPolicies": [
            {"PolicyName": arn.rpartition("/")[2], "PolicyArn": arn} for arn in arns
        ]
    }


@answers("iam", "DeleteRolePolicy")
def delete_role_policy(account: Account, RoleName: str, PolicyName: str) -> dict[str, Any]:
    role = account.get("role", RoleName, "NoSuchEntity").properties
    role["Policies"] = [row for row in role.get("Policies", []) if row["PolicyName"] != PolicyName]
    return {}


@answers("iam", "DetachRolePolicy")
def detach_role_policy(account: Account, RoleName: str, PolicyArn: str) -> dict[str, Any]:
    role = account.get("role", RoleName, "NoSuchEntity").properties
    role["ManagedPolicyArns"] = [
        arn for arn in role.get("ManagedPolicyArns", []) if arn != PolicyArn
    ]
    return {}


@answers("iam", "ListInstanceProfiles")
def list_profiles(account: Account, PathPrefix: str = "/", **_: Any) -> dict[str, Any]:
    return {"InstanceProfiles": [_profile(account, thing) for thing in account.of("instance-profile")
                                 if thing.properties.get("Path", "/").startswith(PathPrefix)]}  # fmt: skip


@answers("iam", "ListInstanceProfilesForRole")
def profiles_of_role(account: Account, RoleName: str, **_: Any) -> dict[str, Any]:
    rows = [
        thing
        for thing in account.of("instance-profile")
        if RoleName in thing.properties.get("Roles", [])
    ]
    return {"InstanceProfiles": [_profile(account, thing) for thing in rows]}


def _profile(account: Account, thing: Thing) -> dict[str, Any]:
    roles = [
        _role(account, account.things[name])
        for name in thing.properties.get("Roles", [])
        if name in account.things
    ]
    return {"InstanceProfileName": thing.id, "Path": thing.properties.get("Path", "/"), "Roles": roles, "Arn": arn_of(account, thing),
            "InstanceProfileId": "AIPA0123456789ABCDEF", "CreateDate": moment_of(thing.since)}  # fmt: skip


@answers("iam", "ListInstanceProfileTags")
def profile_tags(account: Account, InstanceProfileName: str, **_: Any) -> dict[str, Any]:
    return {
        "Tags": tag_list(account.get("instance-profile", InstanceProfileName, "NoSuchEntity").tags)
    }


@answers("iam", "RemoveRoleFromInstanceProfile")
def remove_role(account: Account, InstanceProfileName: str, RoleName: str) -> dict[str, Any]:
    profile = account.get("instance-profile", InstanceProfileName, "NoSuchEntity").properties
    profile["Roles"] = [name for name in profile.get("Roles", []) if name != RoleName]
    return {}


@answers("iam", "DeleteInstanceProfile")
def delete_profile(account: Account, InstanceProfileName: str) -> dict[str, Any]:
    if account.get("instance-profile", InstanceProfileName, "NoSuchEntity").properties.get("Roles"):
        raise Refused(
            "DeleteConflict", "Cannot delete entity, must remove roles from instance profile first."
        )
    del account.things[InstanceProfileName]
    return {}


@answers("iam", "DeleteRole")
def delete_role(account: Account, RoleName: str) -> dict[str, Any]:
    role = account.get("role", RoleName, "NoSuchEntity")
    if (
        role.properties.get("Policies")
        or role.properties.get("ManagedPolicyArns")
        or account.users(role)
    ):
        raise Refused("DeleteConflict", "Cannot delete entity, must delete policies first.")
    del account.things[RoleName]
    return {}


def arn_of(account: Account, thing: Thing) -> str:
    here = f"{account.region}:{account.number}"
    forms = {
        "bucket": f"arn:aws:s3:::{thing.id}", "repository": f"arn:aws:ecr:{here}:repository/{thing.id}",
        "log-group": f"arn:aws:logs:{here}:log-group:{thing.id}", "file-system": f"arn:aws:fsx:{here}:file-system/{thing.id}",
        "role": f"arn:aws:iam::{account.number}:role{thing.properties.get('Path', '/')}{thing.id}",
        "instance-profile": f"arn:aws:iam::{account.number}:instance-profile{thing.properties.get('Path', '/')}{thing.id}",
        "stack": thing.more.get("arn", ""),
    }  # fmt: skip
    return forms.get(thing.kind, f"arn:aws:ec2:{here}:{thing.kind}/{thing.id}")


@answers("resourcegroupstaggingapi", "GetResources")
def get_resources(
    account: Account, TagFilters: Iterable[Mapping[str, Any]] = (), **_: Any
) -> dict[str, Any]:
    """As the real one: roles are not in it, and terminated instances still are."""
    wanted = list(TagFilters)
    rows = [thing for thing in account.things.values() if account.is_seen(thing) and thing.kind not in ("role", "instance-profile") and thing.tags
            and all(one["Key"] in thing.tags and (not one.get("Values") or thing.tags[one["Key"]] in one["Values"]) for one in wanted)]  # fmt: skip
    return {
        "ResourceTagMappingList": [
            {"ResourceARN": arn_of(account, thing), "Tags": tag_list(thing.tags)} for thing in rows
        ]
    }


# What else is asked before and after


@answers("sts", "GetCallerIdentity")
def caller(account: Account) -> dict[str, Any]:
    return {
        "Account": account.number,
        "UserId": "AIDA",
        "Arn": f"arn:aws:iam::{account.number}:user/somebody",
    }


@answers("ssm", "GetParameter")
def parameter(account: Account, Name: str, **_: Any) -> dict[str, Any]:
    value = account.amis.get(Name) or (
        AMIS[Name].id if Name in AMIS and Name not in account.lacks_images else ""
    )
    if not value:
        raise Refused("ParameterNotFound", f"Parameter {Name} not found.")
    return {"Parameter": {"Name": Name, "Value": value, "Type": "String"}}


@answers("ssm", "SendCommand")
def send_command(account: Account, InstanceIds: list[str], **_: Any) -> dict[str, Any]:
    if unknown := [id for id in InstanceIds if not account.things[id].more.get("ssm")]:
        raise Refused(
            "InvalidInstanceId",
            f"Instances {unknown} not in a valid state for account {account.number}",
        )
    return {"Command": {"CommandId": f"{0:08x}-0000-4000-8000-{1:012x}"}}


@answers("ssm", "GetCommandInvocation")
def invocation(account: Account, InstanceId: str, **_: Any) -> dict[str, Any]:
    return {
        "InstanceId": InstanceId,
        "Status": "Success",
        "StandardOutputContent": account.things[InstanceId].more["ssm"],
    }
